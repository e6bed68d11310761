"""Whole runs of `pretrain_ladder.py` that make a standard model late."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.data.indexed import IndexedDatasetWriter
from megatron_ladder.train.record import read_record
from tests.helpers.commands import run_command

RECIPE = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --num-key-value-heads 2 --ffn-hidden-size 64 "
    "--seq-length 16 --micro-batch-size 2 --lr 1e-2 --vocab-size 96 --log-interval 1 --eval-iters 1 --eval-interval 2 "
    "--residual-mode ladder --ladder-layers 1-2 --train-iters 6"
).split()


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    random, prefix = np.random.default_rng(0), tmp_path / "tokens"
    writer = IndexedDatasetWriter(prefix, np.dtype(np.uint16))
    for _ in range(40):
        writer.add_document(random.integers(0, 96, 50))
    writer.publish()
    return ["--data-path", str(prefix), "--split", "70,30,0"]


def pretrain(*words: str | Path) -> str:
    done = run_command([sys.executable, "pretrain_ladder.py", *words], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reported(output: str) -> list[str]:
    """Return loss and lateness of every step, and the losses of evaluations."""
    found = [re.findall(r"(?:lm loss|lateness) [\d.]+", line) for line in output.splitlines() if "lm loss" in line]
    return [" ".join(words) for words in found]


def latenesses(output: str) -> list[str]:
    return [line.partition("lateness ")[2][:5] for line in reported(output)]


def test_a_run_that_anneals_is_resumed_and_evaluated(data: list[str], tmp_path: Path) -> None:
    order = tmp_path / "order.json"
    order.write_text(json.dumps({"order": [0, 2, 1]}))
    annealing = ["--anneal-staleness", "4", "--convert-schedule", f"@{order}"]
    saves = ["--save", tmp_path / "a", "--save-interval", "2"]
    whole = pretrain(*RECIPE, *data, *annealing, *saves)
    assert "ends after step 4, layers 2,1 one after another, linear; until then, nothing overlaps" in whole
    # Each layer has two steps; an evaluation follows every second step, and two steps follow the annealing.
    assert latenesses(whole) == ["0.000", "0.250", "", "0.500", "0.750", "", "", "", ""]
    record = [event for event in read_record(tmp_path / "a") if event["event"] == "progress"]
    assert [event.get("lateness") for event in record] == [0, 0.25, 0.5, 0.75, None, None]
    assert Checkpoint.open(tmp_path / "a" / "iter_0000002").model().ladder_layers == (1, 2)

    order.unlink()
    middle = ["--load", tmp_path / "a" / "iter_0000002", "--save", tmp_path / "b"]
    assert reported(pretrain("--config", tmp_path / "a" / "config.yaml", *middle)) == reported(whole)[3:]

    evaluates = ["--config", tmp_path / "a" / "config.yaml", *middle[:2], "--save", tmp_path / "c", "--skip-train"]
    assert reported(pretrain(*evaluates)) == reported(whole)[2:3]


def test_errors_are_reported_together(tmp_path: Path) -> None:
    words = ["--anneal-staleness", "9", "--convert-schedule", f"@{tmp_path / 'absent.json'}", "--lr-warmup-iters", "6"]
    done = run_command([sys.executable, "pretrain_ladder.py", *RECIPE, *words, "--data-path", "none"], timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    for message in ("--anneal-staleness 9 is above --train-iters 6", "absent.json cannot be read", "leaves no step"):
        assert done.stderr.count(message) == 1, done.stderr
