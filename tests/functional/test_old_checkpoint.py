"""A checkpoint that an earlier commit wrote resumes with bitwise equal results (tests/data/resumed_run/README.md)."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron_ladder.train.record import read_record
from tests.helpers.commands import REPOSITORY_ROOT, free_port, run_command

FOLDER = REPOSITORY_ROOT / "tests" / "data" / "resumed_run"
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --num-key-value-heads 2 --ffn-hidden-size 24 "
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 8 --vocab-size 96 --lr 1e-2 --lr-warmup-iters 1 "
    "--lr-decay-iters 8 --init-method-std 0.2 --train-iters 4 --log-interval 1 --eval-iters 0 "
    f"--residual-mode ladder --split 1 --data-path {FOLDER / 'tokens'} --load {FOLDER / 'iter_0000002'}"
).split()
SAME_ON_ALL_PROCESSORS = {
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "ATEN_CPU_CAPABILITY": "default",
}


def digest_of_tensors(directory: Path) -> str:
    """Return one SHA-256 over the names and bytes of a checkpoint's weights and moments."""
    tensors = {}
    for path in (*directory.glob("weights_*.safetensors"), *directory.glob("optimizer_*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {f"{path.name}/{key}": file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "layout",
    [
        "one process",
        "tensor-parallel",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pipeline", "zero-3, fp32", "sequence-parallel")),
    ],
)
def test_an_old_checkpoint_resumes_bitwise(tmp_path: Path, layout: str) -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())[layout]
    processes = expected["processes"]
    launcher = ["torchrun", "--nproc-per-node", str(processes), "--master-port", str(free_port())]
    head = [sys.executable] if processes == 1 else launcher
    resumed = run_command(
        [*head, "pretrain_ladder.py", *FLAGS, *expected["flags"].split(), "--save", tmp_path],
        timeout=120,
        env=SAME_ON_ALL_PROCESSORS,
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [event["loss"] for event in read_record(tmp_path) if event["event"] == "progress"] == expected["losses"]
    assert digest_of_tensors(tmp_path / "iter_0000004") in expected["tensors_sha256"]
