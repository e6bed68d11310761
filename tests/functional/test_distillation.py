"""`pretrain_ladder.py --distill-from` with launchers, processes and exit codes."""

import hashlib
import sys
from pathlib import Path

import pytest

from megatron_ladder.train.record import read_record
from tests.helpers.commands import free_port, run_command
from tests.helpers.tokens import write_tokens
from tests.unit.convert.hf_models import random_model, write_hf
from tests.unit.generate.tiny_model import reference_of, tiny_config, write_checkpoint

RECIPE = "--seq-length 16 --micro-batch-size 2 --lr 1e-3 --log-interval 1 --eval-iters 0".split()
MODEL = {"residual_mode": "ladder", "ladder_layers": (1, 2)}


def deepspeed(processes: int) -> list[str]:
    return ["deepspeed", "--num_gpus", str(processes), "--master_port", str(free_port()), "pretrain_ladder.py"]


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    return ["--data-path", str(write_tokens(tmp_path / "tokens", 67)), "--split", "1"]


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def distillation_losses(save: Path) -> list[float]:
    return [event["distillation_loss"] for event in read_record(save) if event["event"] == "progress"]


def test_a_model_leaves_its_teacher_and_resumes_with_another(data: list[str], tmp_path: Path) -> None:
    """The student starts as the teacher itself."""
    teacher, hf = tmp_path / "teacher", write_hf(random_model(tiny_config(num_layers=1)), tmp_path / "hf")
    write_checkpoint(teacher, tiny_config(**MODEL), reference_of(tiny_config(**MODEL))[0])
    before = contents(teacher) | contents(hf)
    argv = [*RECIPE, *data, "--save", tmp_path / "a", "--tensorboard-dir", tmp_path / "tb"]
    begun = f"--train-iters 3 --tensor-model-parallel-size 2 --load {teacher} --finetune --distill-weight 0.5".split()
    done = run_command([*deepspeed(2), *argv, *begun, "--distill-from", teacher], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *others = distillation_losses(tmp_path / "a")
    assert abs(first) < 1e-5 and len(others) == 2 and min(others) > 1e-4
    assert "3 layers, hidden 32, ladder: weight 0.5, temperature 1" in done.stdout
    assert f"| distillation loss {others[-1]:.4g} |" in done.stdout

    resumed = [*argv, "--train-iters", "4", "--load", tmp_path / "a", "--distill-from", hf, "--bf16"]
    done = run_command([sys.executable, "pretrain_ladder.py", *resumed], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 steps done" in done.stdout and "1 layers, hidden 32, standard: weight 0.5" in done.stdout
    assert distillation_losses(tmp_path / "a")[-1] > max(others)
    assert contents(teacher) | contents(hf) == before
