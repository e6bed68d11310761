"""The command line of tools/study.py, and the trials' configurations."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ladder_lab.study.command_line import parse_options, timed_wirings
from ladder_lab.study.commands import environment_of, resolve_trial, training_command
from ladder_lab.study.options import ReportOptions
from ladder_lab.study.schema import Trial
from ladder_lab.study.wirings import DEFAULT_WIRINGS
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.config.run import RunConfig
from megatron_ladder.errors import UserError

FIRST = "--output-dir out --sizes 4x32x64x4x2x300"


def request_of(words: str) -> Any:
    return parse_options(f"run {FIRST} {words}".split())


def mistakes_of(words: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        request_of(words)
    return caught.value.messages


def test_defaults_are_the_study_of_two_cores() -> None:
    options = parse_options(["run", "--output-dir", "out"]).options
    assert options.wirings == timed_wirings(options) == DEFAULT_WIRINGS
    assert len(options.seeds) >= 3 and len(options.learning_rates) >= 3 and options.jobs == 2
    assert all(int(size.split("x")[0]) >= 8 for size in options.sizes)


def test_small_has_other_defaults_and_the_same_flags() -> None:
    small = parse_options("run --small --output-dir out --seeds 7".split()).options
    full = parse_options("run --output-dir out".split()).options
    assert small.seeds == (7,) and small.wirings == full.wirings
    assert small.iterations < full.iterations and small.seq_length == full.seq_length


def test_standard_is_always_timed() -> None:
    """The times of the others are ratios to it."""
    assert timed_wirings(request_of("--timed-wirings ladder parallel").options) == ("standard", "ladder", "parallel")
    assert timed_wirings(request_of("--timed-wirings ladder standard").options) == ("ladder", "standard")
    assert timed_wirings(request_of("--timed-wirings none").options) == ()


def test_the_report_alone() -> None:
    options = parse_options("report --output-dir out".split())
    assert isinstance(options, ReportOptions) and options.output_dir == Path("out")
    with pytest.raises(UserError, match="trian: expected one of run, .*report first"):
        parse_options(["trian"])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--wirings standard gated", "--wirings gated: expected one of standard, ladder"),
        ("--wirings ladder parallel", "--wirings ladder parallel: add standard, with which all others are compared"),
        ("--timed-wirings standard hybrid", "--timed-wirings hybrid: expected some of --wirings, or none"),
        ("--learning-rates-from out --learning-rates 1e-3", "--learning-rates-from"),
        ("--sizes 8x3", "--sizes 8x3: expected one of small"),
        ("--seeds 1 100", "--tuning-seed 100: must not be one of --seeds"),
        ("--seeds 1 1", "--seeds 1: is given twice"),
        ("--seeds -1", "--seeds -1: expected 0 or more"),
        ("--link 0", "--link 0: expected a time such as 1.2c or 2ms, or own"),
        ("--link fast", "--link fast: expected a time"),
        ("--timing-ranks 3", "--timing-ranks 3: --num-attention-heads 4 is not divisible"),
        ("--timing-ranks 1", "--timing-ranks 1: expected 2 or more"),
        ("--timing-rounds 3", "--timing-rounds 3: expected 4 or more"),
        ("--iterations 0", "--iterations 0: expected 1 or more"),
        ("--learning-rates 1e-3 0", "--learning-rates 0.0: expected above 0"),
        ("--warm-up-share 1", "--warm-up-share 1.0: expected 0 or more, below 1"),
        ("--last-rate-share 2", "--last-rate-share 2.0: expected 0 to 1"),
        ("--launcher no-such-program", "--launcher no-such-program: no-such-program is not an executable"),
        ("-- --train-iters 5", "--train-iters after --: a study sets this flag for each trial"),
        ("-- --own-partials 2", "--lanes after --: a study sets this flag for each trial"),
        ("-- --num-query-groups 1", "--num-key-value-heads after --: a study sets this flag for each trial"),
        ("-- --no-tie-embeddings", "--tie-embeddings after --: a study sets this flag for each trial"),
        ("-- --no-such-flag 5", "--no-such-flag is not a flag of this program"),
        # Errors of the trainer.
        ("--global-batch-size 33", "--global-batch-size 33 is not a multiple of --micro-batch-size 32"),
        ("-- --tensor-model-parallel-size 3", "--num-attention-heads 4 is not divisible"),
    ],
)
def test_errors_name_the_flag(words: str, error: str) -> None:
    found = mistakes_of(words)
    assert any(one.startswith(error) for one in found), found


def test_all_errors_are_reported_together_and_once() -> None:
    assert len(mistakes_of("--wirings standard a --sizes b --link c --jobs 0 -- --seed 1")) == 5
    # All wirings have it.
    assert len(mistakes_of("--global-batch-size 33")) == 1


@pytest.mark.parametrize("command", ["run", "adapt", "report"])
def test_missing_libraries_are_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"matplotlib .*\[plot\]'\nscipy .*\[lab\]'"):
        parse_options([command, "--output-dir", "out"])


def trial_of(wiring: str, **changes: Any) -> Trial:
    values = {"kind": "tokens", "size": "4x32x64x4x2x300", "seed": 3, "learning_rate": 2e-3, "iterations": 50}
    return Trial(wiring=wiring, **{**values, **changes})


def resolved(wiring: str, words: str = "", **changes: Any) -> RunConfig:
    errors: list[str] = []
    run = resolve_trial(request_of(words), trial_of(wiring, **changes), errors)
    assert errors == []
    return run


def test_trials_differ_only_in_their_wiring() -> None:
    runs = {wiring: resolved(wiring) for wiring in NAMED_WIRINGS}
    assert {name: (run.model.residual_mode, run.model.ladder_layers) for name, run in runs.items()} == {
        "standard": ("standard", ()),
        "parallel": ("parallel", ()),
        "ladder": ("ladder", (0, 1, 2, 3)),
        "ladder-parallel": ("ladder-parallel", (0, 1, 2, 3)),
        "staleness-2": ("ladder", (0, 1, 2, 3)),
        "ladder-attention": ("ladder-attention", (0, 1, 2, 3)),
        "hybrid": ("ladder", (2, 3)),
        "desync-2x": ("desync", ()),
        "desync-4x": ("desync", ()),
        **{f"own-partials-{staleness}": ("ladder", (0, 1, 2, 3)) for staleness in (1, 2, 4)},
    }
    late = {name: run.model.residual_staleness for name, run in runs.items() if run.model.residual_staleness > 1}
    assert late == {"staleness-2": 2, "own-partials-2": 2, "own-partials-4": 4}
    lanes = {f"own-partials-{staleness}" for staleness in (1, 2, 4)}
    assert {name: run.model.lanes for name, run in runs.items() if run.model.lanes} == dict.fromkeys(lanes, 2)
    assert {name for name, run in runs.items() if run.world_size == 2} == {"desync-2x", "desync-4x", *lanes}
    assert [runs[name].model.desync_interval for name in ("standard", "desync-2x", "desync-4x")] == [0, 2, 4]
    assert len({(run.optimizer, run.training, run.data) for run in runs.values()}) == 1
    assert {run.training.seed for run in runs.values()} == {3}


def test_a_schedule_has_the_length_of_its_trial() -> None:
    long, short = resolved("ladder", iterations=200), resolved("ladder", iterations=50, kind="tuning")
    assert (long.optimizer.lr, long.optimizer.min_lr) == (short.optimizer.lr, short.optimizer.min_lr) == (2e-3, 2e-4)
    assert (long.optimizer.lr_warmup_iters, short.optimizer.lr_warmup_iters) == (20, 5)
    # Five evaluations for any number of steps, the last one of the finished model.
    assert resolved("ladder", "--evaluations 5", iterations=137).logging.eval_interval == 28
    assert (long.training.train_iters, long.optimizer.lr_decay_iters) == (200, None)
    assert long.tokens_per_step == short.tokens_per_step == 32 * 128
    assert (long.model.num_layers, long.model.ffn_hidden_size, long.model.num_key_value_heads) == (4, 64, 2)


def test_training_flags_reach_every_trial() -> None:
    run = resolved("ladder", "-- --bf16 --tensor-model-parallel-size 2")
    assert run.training.bf16 and run.world_size == 2
    four_heads = resolved("desync-2x", "-- --tensor-model-parallel-size 4", size="4x32x64x4x4x300")
    assert four_heads.model.desync_tp == 4


def test_trials_run_locally_or_through_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    here = request_of("")
    command = training_command(replace(here, data_flags=("--train-data-path", "x")), trial_of("ladder"), 1)
    assert command[0] == sys.executable and command[1].endswith("pretrain_ladder.py") and Path(command[1]).is_file()
    assert command[command.index("--train-data-path") + 1] == "x"
    assert command[command.index("--save") + 1] == command[command.index("--load") + 1]
    assert environment_of(here.options)["OMP_NUM_THREADS"] == "1"
    ranks = training_command(here, trial_of("desync-2x"), 2)
    assert "run_ranks" in ranks[3] and ranks[4:] == training_command(here, trial_of("desync-2x"), 1)[2:]
    launched = parse_options(["run", *FIRST.split(), "--launcher", f"{sys.executable} -m launcher --hosts 'a b'"])
    command = training_command(launched, trial_of("desync-2x"), 2)
    assert command[:5] == (sys.executable, "-m", "launcher", "--hosts", "a b")
    assert command[5].endswith("pretrain_ladder.py")
    assert environment_of(launched.options)["OMP_NUM_THREADS"] == "7"
