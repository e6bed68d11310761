"""The benchmark runs on a tiny model, and its times obey the emulated wire."""

import contextlib
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

SHAPE = "--layers 2 --hidden 64 --intermediate 128 --heads 2 --kv-heads 2 --vocab 96"
EXPERTS = "--experts 4 --expert-intermediate 64 --shared-intermediate 64"
RUN = "--rounds 3 --steps 4 --prefill-tokens 16 --batch 2 --alpha 30 --wirings ladder ladder-parallel"


def print_table(arguments: list[str]) -> list[str]:
    """Run the benchmark as one of the ranks; return the lines of its table. vLLM logs to the same output."""
    from vllm import envs

    from vllm_plugin import benchmark

    # An engine of an earlier test has frozen the variables that vLLM reads.
    envs.disable_envs_cache()
    with patch.dict(os.environ, benchmark.ENGINE_VARIABLES), contextlib.redirect_stdout(io.StringIO()) as printed:
        benchmark.main(arguments)
    envs.disable_envs_cache()
    return [line for line in printed.getvalue().splitlines() if line.startswith("|")]


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_a_slow_wire_limits_every_wiring(mode: str, ranks: Any) -> None:
    first, second = ranks(print_table, [*SHAPE.split(), *RUN.split(), "--mode", mode])
    assert second == []
    head, _, *lines = (line[2:-2].split(" | ") for line in first)
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    wirings = ["standard", "ladder", "ladder-parallel", "no-comm"]
    assert [(row["case"], row["wiring"]) for row in rows] == [
        (case, wiring) for case in ("decode", "prefill") for wiring in wirings
    ]
    for standard, ladder, ladder_parallel, no_comm in (rows[:4], rows[4:]):
        for row in standard, ladder, ladder_parallel:
            assert 0.5 < float(row["share of the wire"]) <= 1.01
        # Half as many all-reduces: the wiring that was compiled is the one that is measured.
        assert 1.3 < float(ladder_parallel["standard / wiring"]) < 2.2
        assert float(no_comm["standard / wiring"]) > 5


def test_wirings_of_experts_are_measured(ranks: Any) -> None:
    run = "--rounds 1 --steps 2 --batch 1 --case decode --alpha 0 --mode eager --wirings ladder farskip shortcut"
    first, _ = ranks(print_table, [*SHAPE.split(), *EXPERTS.split(), *run.split()])
    assert [line.split(" | ")[4] for line in first[2:]] == ["standard", "ladder", "farskip", "shortcut", "no-comm"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_ends_when_its_tokens_arrive(asynchronous: bool, models: Path, one: Any) -> None:
    """With asynchronous scheduling, the engine is called once more than there are steps."""
    ((arrivals, calls),) = one(time_steps, models / "ladder", asynchronous)
    assert arrivals == sorted(arrivals) and len(arrivals) == 1 + 5
    assert (calls > 5) == asynchronous


def time_steps(folder: Path, asynchronous: bool) -> tuple[list[float], int]:
    """Return when the tokens of a prefill and of four decode steps arrive, and how often the engine was called."""
    from vllm.platforms.cpu import CpuPlatform

    from vllm_plugin import benchmark
    from vllm_plugin.tests import engines

    update = CpuPlatform.check_and_update_config

    def schedule_as_on_gpus(_platform: Any, vllm_config: Any) -> None:
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asynchronous

    with patch.object(CpuPlatform, "check_and_update_config", schedule_as_on_gpus):
        engine = engines.build(folder).llm_engine
    with patch.object(engine, "step", wraps=engine.step) as step:
        return benchmark.time_tokens(engine, [[1, 2, 3]] * 2, 5, lambda: None), step.call_count


def test_engines_on_gpus_have_the_same_graphs() -> None:
    from vllm_plugin import benchmark

    options = SimpleNamespace(wirings=["ladder"], experts=0, case=["prefill"], prefill_tokens=16, rounds=1)
    engine = Mock(graphs="FULL", run=lambda case: 1.0)
    with patch.object(benchmark, "Engine", return_value=engine) as built:
        rows = list(benchmark.measure_real(options, "inductor"))
    assert [row["wiring"] for row in rows] == ["standard", "ladder", benchmark.LLAMA]
    assert [call.args[2:] for call in built.call_args_list] == [
        ("standard", None),
        ("ladder", "FULL"),
        (benchmark.LLAMA, "FULL"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--wirings farskip", "--wirings farskip: they need --experts"),
        (
            "--experts 4 --shared-intermediate 0 --wirings shortcut",
            "--wirings shortcut: it needs --shared-intermediate",
        ),
        ("--experts 4 --topk 5", "--topk 5: expected 1 to --experts 4"),
    ],
)
def test_wirings_without_their_experts_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_plugin import benchmark

    with pytest.raises(SystemExit) as exit_:
        benchmark.parse_arguments(arguments.split())
    assert exit_.value.code == 2 and message in capsys.readouterr().err
