"""`pretrain_ladder.py` with real launchers, real processes and exit codes."""

import os
import re
import sys
from pathlib import Path

import psutil
import pytest
import torch

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.train.record import read_record
from tests.chaos.runs import final_tensors
from tests.helpers.commands import REPOSITORY_ROOT, Command, launch, run_command, running
from tests.helpers.tokens import write_tokens

VOCABULARY = 96
RECIPE = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --num-key-value-heads 2 --ffn-hidden-size 64 "
    f"--seq-length 16 --micro-batch-size 2 --lr 1e-2 --lr-warmup-iters 2 --vocab-size {VOCABULARY} "
    "--log-interval 1 --eval-iters 0 --residual-mode ladder --ladder-layers 1-2"
).split()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens", VOCABULARY)


START = 240
"""Time limit for launchers and processes to start, also on a busy machine."""


def losses(output: str) -> list[str]:
    return [line.split("|")[1].strip() for line in output.splitlines() if "| lm loss" in line]


EXPERTS = (
    "--num-experts 8 --moe-layers 1-2 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01 --moe-grouped-gemm"
).split()


def test_a_resumed_run_equals_an_uninterrupted_run_bitwise(tokens: Path, tmp_path: Path) -> None:
    argv = [
        *RECIPE,
        *EXPERTS,
        *f"--data-path {tokens} --split 1 --train-iters 8 --tensor-model-parallel-size 2".split(),
    ]
    saves = ["--save", tmp_path / "a", "--save-interval", "4", "--async-save"]
    whole = run_command([*launch("deepspeed"), *argv, *saves], timeout=120)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "without --save" not in whole.stdout and "nothing was saved" not in whole.stdout
    config = tmp_path / "a" / "config.yaml"
    part = run_command(
        [*launch("torchrun"), "--config", config, "--load", tmp_path / "a" / "iter_0000004", "--save", tmp_path / "b"],
        timeout=120,
    )
    assert part.returncode == 0, part.stdout + part.stderr
    assert "4 steps done" in part.stdout
    assert len(losses(whole.stdout)) == 8 and losses(part.stdout) == losses(whole.stdout)[4:]
    first, second = (final_tensors(tmp_path / name) for name in "ab")
    assert first.keys() == second.keys() and len(first) > 50
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key
    biases = [tensor for key, tensor in first.items() if "router.expert_bias" in key]
    assert len(biases) == 2 and all(0 < bias.abs().max() < 0.0081 for bias in biases)
    assert whole.stdout.count("| largest expert load ") == whole.stdout.count("| dead experts ") == 8
    (*_, last) = (event for event in read_record(tmp_path / "a") if event["event"] == "progress")
    assert last["largest_expert_load"] >= 1 and 0 < last["expert_load_entropy"] <= 1 and last["dead_experts"] < 16
    assert Checkpoint.open(tmp_path / "b").consumed_samples == 16
    ours, theirs = ((tmp_path / name / "config.yaml").read_text().splitlines() for name in "ab")
    assert {line.split(":")[0] for line in set(ours) ^ set(theirs)} == {"save", "load"}
    assert not [path for path in (tmp_path / "a").iterdir() if ".tmp" in path.name]


@pytest.mark.parametrize("stage", ["0", "1", "3"])
def test_one_process_reports_a_start_from_scratch_and_never_compiles(tokens: Path, tmp_path: Path, stage: str) -> None:
    """A killed build of DeepSpeed's operators leaves a lock, for which nothing may wait.

    Importing torch's compiler takes seconds. DeepSpeed imports it, and only ZeRO 2 and 3 import DeepSpeed.
    """
    extensions = tmp_path / "extensions"
    (extensions / "deepspeed_shm_comm").mkdir(parents=True)
    (extensions / "deepspeed_shm_comm" / "lock").touch()
    (tmp_path / "emtpy" / "iter_0000001").mkdir(parents=True)
    words = (
        f"-X importtime pretrain_ladder.py --data-path {tokens} --split 90,10,0 --train-iters 3 "
        f"--load {tmp_path}/empty --tensorboard-dir {tmp_path}/tb --zero-stage {stage}" + " --bf16" * (stage != "0")
    )
    environment = {"TORCH_EXTENSIONS_DIR": str(extensions)}
    argv = [sys.executable, *words.split(), *RECIPE, "--eval-iters", "1"]
    done = run_command(argv, timeout=90, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    hint = f"did you mean {tmp_path / 'emtpy'}?"
    assert f"--load {tmp_path / 'empty'} holds no checkpoint: the run starts from scratch: {hint} ***" in done.stdout
    assert "valid lm loss" in done.stdout and "ETA" in done.stdout
    warning = "*** without --save: the weights that this run learns are lost when it ends ***"
    lines = done.stdout.splitlines()
    assert lines.index(warning) < next(number for number, line in enumerate(lines) if "| lm loss" in line)
    assert lines[-1] == "nothing was saved after iteration 3: --save was not given"
    assert " torch\n" in done.stderr
    for module in ("deepspeed", "torch._inductor.compile_fx"):
        assert (f" {module}\n" in done.stderr) is (stage == "3")
    assert sorted(os.listdir(extensions)) == ["deepspeed_shm_comm"]
    assert os.listdir(extensions / "deepspeed_shm_comm") == ["lock"]
    assert list((tmp_path / "tb").glob("events*"))


def loop(launcher: str, flags: list[str | Path], folder: Path) -> list[str]:
    page = (REPOSITORY_ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```bash\n(dir=.*?)```", page, re.DOTALL)
    words = " ".join(map(str, [*RECIPE, "--split", "1", *flags]))
    command = " ".join([*launch(launcher), words])
    changed = script.replace("deepspeed --quiet --num_gpus 8 pretrain_ladder.py ...", command)
    changed = changed.replace("dir=checkpoints", f"dir={folder}").replace("10 * attempt", "0")
    assert command in changed and str(folder) in changed
    return ["bash", "-c", changed]


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_run_with_a_killed_rank_resumes_until_it_is_asked_to_stop(
    launcher: str, tokens: Path, tmp_path: Path
) -> None:
    stop, save = tmp_path / "stop", tmp_path / "run"
    flags = ["--data-path", tokens, "--train-iters", "1000000", "--save-interval", "2", "--kill-switch-file", stop]
    command = Command(loop(launcher, flags, save), tmp_path / "loop", {"DS_ACCELERATOR": "cpu"})
    with running(command):
        command.wait_for("iteration       5/", START)
        ranks = [one for one in psutil.Process(command.process.pid).children(recursive=True) if "RANK" in one.environ()]
        ranks[-1].kill()
        command.wait_for("worth another attempt", START)
        command.wait_for("continues from", START)
        stop.touch()
        assert command.wait(START) == 0, command.stdout + command.stderr
    assert (
        command.stdout.count("worth another attempt") == 1
        and "the run finished, or was asked to stop" in command.stdout
    )


@pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_invalid_input_is_not_repeated(launcher: str, tokens: Path, tmp_path: Path) -> None:
    flags = ["--data-path", tokens, "--train-iters", "3", "--hidden-sise", "3"]
    command = Command(loop(launcher, flags, tmp_path / "run"), tmp_path / "loop", {"DS_ACCELERATOR": "cpu"})
    with running(command):
        assert command.wait(START) == 2, command.stdout + command.stderr
    assert command.stderr.count("error: --hidden-sise ") == 1 and command.stdout.count("the input was invalid") == 1
