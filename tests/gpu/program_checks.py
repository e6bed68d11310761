"""Checks that run whole programs, as a user does."""

import functools
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ladder_lab.bench.sizes import find_size
from megatron_ladder.blueprint.flops import ModelFlops, peak_flops
from megatron_ladder.comm.watch import BEAT_SECONDS, MOST_MISSED_BEATS
from megatron_ladder.errors import ExitCode
from tests.chaos.runs import VOCABULARY, final_tensors, losses
from tests.gpu import on_ranks
from tests.gpu.rank_checks import NOT_COMPILED, Decoded, compare_decoded, decoding_model
from tests.gpu.runner import Machine, NotRun, Value, check
from tests.helpers.commands import REPOSITORY_ROOT, Command, free_port, launch, running
from tests.helpers.tokens import write_tokens
from tests.helpers.whole_runs import (
    DATA,
    MODELS,
    TOLERANCE,
    Curves,
    assert_equal_curves,
    command_line,
    curves_in,
    write_corpus,
)

EXIT_SECONDS = 30.0
"""Time in which a program must end after its last work, and ranks after the loss of another one is detected."""
TIMEOUT_SECONDS = 15
"""Time after which a training run gives up on a lost rank that NCCL does not notice."""
LONGEST_DETECTION = BEAT_SECONDS * (MOST_MISSED_BEATS + 1)
"""Seconds until a rank in a captured step knows that another one is gone."""


@check("20 steps, saved both ways, resumed bitwise", gpus=(2, 8), seconds=240)
def resumes(machine: Machine, ranks: int) -> str:
    folder = machine.folder / f"resumes {ranks}"
    folder.mkdir()
    layout = ["--tensor-model-parallel-size", "2", *(["--pipeline-model-parallel-size", "2"] if ranks > 2 else [])]
    argv = training_flags(folder) + ["--train-iters", "20", "--save-interval", "10", *layout, "--deterministic-mode"]
    whole, resumed = folder / "whole", folder / "resumed"
    machine.command(*launch("deepspeed", ranks), *argv, "--save", whole, "--async-save")
    machine.command(*launch("torchrun", ranks), *argv, "--load", whole / "iter_0000010", "--save", resumed)
    wanted, found = final_tensors(whole), final_tensors(resumed)
    assert found.keys() == wanted.keys() and len(wanted) > 50
    different = [key for key, tensor in found.items() if not torch.equal(tensor, wanted[key])]
    assert not different, f"{len(different)} tensors differ after the resume, such as {different[0]}"
    history, again = losses(whole), losses(resumed)
    assert sorted(history) == list(range(1, 21)), f"steps {sorted(history)}"
    assert again == {step: history[step] for step in range(11, 21)}, f"{again} instead of {history}"
    return f"{len(wanted)} tensors and all losses are equal; final loss {min(history[20]):.3f}"


def training_flags(folder: Path) -> list[str]:
    """Return flags of a small run, and write its data."""
    recipe = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --seq-length 16 --split 1 "
        f"--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-warmup-iters 2 --vocab-size {VOCABULARY} "
        "--log-interval 1 --eval-iters 0 --residual-mode ladder --bf16 --zero-stage 1"
    ).split()
    return [*recipe, "--data-path", str(write_tokens(folder / "tokens", VOCABULARY))]


@check("whole runs, compared with one process", gpus=(2, 8), seconds=240)
def whole_runs(machine: Machine, ranks: int) -> str:
    folder = machine.folder / f"whole runs {ranks}"
    folder.mkdir()
    corpus = write_corpus(folder)
    layouts = {
        "PP2": "--pipeline-model-parallel-size 2",
        "TP2+SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    }
    if ranks > 2:
        layouts = {
            f"PP4 x DP{ranks // 4}": "--pipeline-model-parallel-size 4",
            f"TP2 x PP2 x DP{ranks // 4}": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        }

    def run(processes: int, model: str, data: str, layout: str) -> Curves:
        curves = folder / f"{model} {processes} {layout}"
        argv = command_line(corpus, MODELS[model], DATA[data], NOT_COMPILED, layout)
        machine.command(*launch("torchrun", processes), *argv, "--tensorboard-dir", curves)
        return curves_in(curves)

    scalars = 0
    for model, data in (("softmax", "documents"), ("sigmoid", "answers")):
        expected = run(1, model, data, "")
        scalars += sum(map(len, expected.values()))
        for name, layout in layouts.items():
            try:
                assert_equal_curves(run(ranks, model, data, layout), expected, 1e-5 if machine.on_gpu else TOLERANCE)
            except AssertionError as error:
                raise AssertionError(f"{model}, {name}: {error}") from None
    return f"{scalars} scalars of two models with experts equal in {' and '.join(layouts)}"


@check("generate.py on several GPUs, compared with one; time to exit", gpus=(2, 8), seconds=180)
def generation(machine: Machine, ranks: int) -> str:
    flags = ["--tp-all-reduce", "auto"] if machine.on_gpu else []
    eager = ["--no-cuda-graph"]
    runs: list[tuple[int, list[str]]] = [(1, eager), (ranks, eager), *([(ranks, flags)] if flags else [])]
    results, times = zip(*(generated(machine, processes, more) for processes, more in runs), strict=True)
    wanted, *others = results
    compared = [compare_decoded(other, wanted, "fp32") for other in others]
    assert all(equal == len(wanted[0][0]) for equal, _ in compared)
    worst = max(difference for _, difference in compared)
    return f"{compared[0][0]} tokens equal, logprobs within {worst:.1e}; exit within {max(times):.1f} s of the output"


def generated(machine: Machine, processes: int, more: Sequence[str]) -> tuple[Decoded, float]:
    """Run generate.py; return its result, and the seconds from its output to its end."""
    words = "--tokens 5,9,3,7 --max-new-tokens 32 --temperature 0 --dtype fp32 --json --logprobs"
    command = [sys.executable, "tools/generate.py", "--model", str(decoding_model(machine)), *words.split()]
    command += ["--tp", str(processes), *more]
    started = Command(command, machine.folder / "generated", machine.environment())
    with running(started):
        started.wait_for("\n", machine.seconds_left)
        began = time.monotonic()
        code = started.wait(EXIT_SECONDS)
        seconds = time.monotonic() - began
    assert code == 0, f"exit code {code}: {started.description}"
    values = json.loads(started.stdout)
    return [(values["ids"], values["logprobs"])], seconds


@check("exit after a rank was killed", gpus=(2, 8), seconds=150, value=Value.ROBUST)
def killed_rank(machine: Machine, ranks: int) -> str:
    folder = machine.folder / f"killed {ranks}"
    folder.mkdir()
    save = folder / "save"
    words = "--train-iters 1000000 --save-interval 1000000 --tensor-model-parallel-size 2"
    words += f" --distributed-timeout-seconds-after-first-step {TIMEOUT_SECONDS} {NOT_COMPILED}"
    command = ["pretrain_ladder.py", *training_flags(folder), *words.split(), "--save", str(save)]
    figure = _exit_without_a_rank(machine, ranks, folder, command, lambda rank_0: len(losses(save)) >= 3)
    # On GPUs, NCCL's watchdog may abort a process before it can report.
    assert machine.on_gpu or figure.endswith("lost rank named"), figure
    return figure


@check("exit of generate.py after a rank was killed", gpus=(2, 8), seconds=150, value=Value.ROBUST)
def killed_generation(machine: Machine, ranks: int) -> str:
    folder = machine.folder / f"killed generation {ranks}"
    folder.mkdir()
    # Until then, a captured step runs thousands of times.
    words = "--tokens 5,9,3,7 --num-samples 4 --max-new-tokens 2000 --ignore-eos --stream"
    command = ["tools/generate.py", "--model", str(decoding_model(machine)), *words.split()]
    return _exit_without_a_rank(machine, ranks, folder, command, lambda rank_0: len(rank_0.stdout) > 0)


def _exit_without_a_rank(
    machine: Machine, ranks: int, folder: Path, command: Sequence[str], has_begun: Callable[[Command], bool]
) -> str:
    """Run a program without a launcher, which would end the other ranks, and kill the last rank once it has begun."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        Command(
            [sys.executable, *command],
            folder / f"rank{rank}",
            machine.environment() | shared | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
        )
        for rank in range(ranks)
    ]
    with running(*processes):
        while not has_begun(processes[0]):
            ended = [one.description for one in processes if one.process.poll() is not None]
            waits = not ended and machine.seconds_left > LONGEST_DETECTION + EXIT_SECONDS
            assert waits, f"nothing to interrupt; ended ranks: {ended}\n{processes[0].description}"
            time.sleep(0.05)
        os.killpg(processes[-1].process.pid, signal.SIGKILL)
        began = time.monotonic()
        ends = began + LONGEST_DETECTION + EXIT_SECONDS
        codes = sorted({one.wait(ends - time.monotonic()) for one in processes[:-1]})
        seconds = time.monotonic() - began
        text = "".join(one.stdout + one.stderr for one in processes)
    named = "named" if f"rank {ranks - 1}" in text else "not named"
    figure = f"exit code {', '.join(map(str, codes))} after {seconds:.1f} s; lost rank {named}"
    assert 0 not in codes and (machine.on_gpu or codes == [ExitCode.LOST_PEER]), f"{figure}\n{text}"
    return figure


SHAPES = {"1B": "llama-1b", "8B": "8x4096x14336x32x8x128256"}
"""Shapes of the throughput check, with fewer layers where two models with gradients need more than 80 GB."""
SEQUENCE = 2048
CPU_SHAPES = {"1B": "2x64x160x4x4x256", "8B": "2x128x384x8x2x512"}


def speed(flops_per_second: float, device: str) -> str:
    """Return a speed in model FLOPs, with its share of the peak (MFU) of GPUs that the planner knows."""
    peak = peak_flops(device)
    return f"{flops_per_second / 1e12:.3g} TFLOP/s" + (f", MFU {flops_per_second / peak:.1%}" if peak else "")


def throughput(machine: Machine, ranks: int, name: str) -> str:
    result = machine.folder / f"throughput {name}.json"
    flags = ["--size", SHAPES[name], "--sequence", str(SEQUENCE)]
    if not machine.on_gpu:
        flags = ["--size", CPU_SHAPES[name], "--sequence", "64", "--matrix", "256", "--backend", "none"]
    # 3: too noisy to judge, with results.
    command = [sys.executable, "tools/throughput.py", *flags, "--rounds", "5", "--json", result]
    machine.command(*command, codes=(ExitCode.DONE, ExitCode.BAD_NUMBERS))
    rows: dict[str, dict[str, Any]] = {row["way"]: row for row in json.loads(result.read_text())}
    device = machine.description
    figure = "; ".join(
        f"{way} {speed(row['model_flops_per_second'], device)}, {row['utilisation']:.0%} of a product's rate"
        + ("" if way == "transformers" else f", {row['speed_over_transformers']:.2f} x transformers")
        + ("" if row["verdict"] == "sound" else f" ({row['verdict']})")
        for way, row in rows.items()
    )
    assert rows.keys() == {"standard", "ladder", "transformers"}, figure
    assert all(0 < row["utilisation"] < 1.1 for row in rows.values()) or not machine.on_gpu, figure
    slower = [row for row in rows.values() if row["speed_over_transformers"] + row["spread"] < 1]
    assert not (slower and machine.on_gpu), f"slower than transformers: {figure}"
    return figure


for _shape in SHAPES:
    check(f"throughput of {_shape} shapes, compared with transformers", gpus=1, seconds=240, value=Value.FAST)(
        functools.partial(throughput, name=_shape)
    )


@check("throughput of 1B shapes in torchtitan", gpus=1, seconds=240, value=Value.FAST)
def torchtitan(machine: Machine, ranks: int) -> str:
    if importlib.util.find_spec("torchtitan") is None:
        raise NotRun("torchtitan is not installed")
    flavor, sequence = ("1B", SEQUENCE) if machine.on_gpu else ("debugmodel", 64)
    ((seconds, difference),) = machine.call(ranks, on_ranks.time_torchtitan, flavor, sequence)
    if not seconds:
        raise NotRun(f"torchtitan {version('torchtitan')} has another interface: {difference}")
    flops = ModelFlops(find_size("llama-1b"), sequence).training
    return speed(flops / seconds, machine.description) if machine.on_gpu else f"forward in {1e3 * seconds:.0f} ms"


@check("overlapped all-reduces in vLLM, compared with the same in order", gpus=2, seconds=1200, value=Value.ROBUST)
def serving(machine: Machine, ranks: int) -> str:
    python = REPOSITORY_ROOT / "vllm_plugin" / ".venv" / "bin" / "python"
    if not python.exists():
        raise NotRun("vLLM is not installed: run bash vllm_plugin/install.sh")
    tiny = "--device cpu --hidden 64 --intermediate 128 --heads 2 --kv-heads 2 --layers 2 --vocab 96 --steps 8"
    flags = [] if machine.on_gpu else tiny.split()
    done = machine.command(python, "vllm_plugin/check_gpu.py", "--tp", str(ranks), *flags)
    return "; ".join(line for line in done.stdout.splitlines() if "bitwise equal" in line)
