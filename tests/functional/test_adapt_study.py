"""The whole `tools/study.py adapt`: standard models are trained, rewired, evaluated, healed and reported."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.commands import run_command
from tests.helpers.tokens import write_documents

SIZE, VOCABULARY = "2x32x64x4x2x96", 96


def write_tokens(prefix: Path) -> Path:
    """Write text that a model can learn: every token determines the next one, with some noise."""
    random = np.random.default_rng(0)
    steps = np.where(random.random((200, 100)) < 0.9, 7, random.integers(0, VOCABULARY, (200, 100)))
    return write_documents(prefix, *np.cumsum(steps, axis=1) % VOCABULARY)


@pytest.mark.slow
def test_standard_models_are_adapted(tmp_path: Path) -> None:
    """The second start trains nothing and writes the same report."""
    out = tmp_path / "study"
    words = (
        f"tools/study.py adapt --output-dir {out} --size {SIZE} --seeds 1 2 --iterations 60 --learning-rates 1e-2 "
        "--seq-length 16 --healing-percent 5 50 --eval-iters 4 -- --split 90,10,0 --data-path"
    )
    command = [sys.executable, *words.split(), write_tokens(tmp_path / "tokens")]
    done = run_command(command, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {path.parent.name: json.loads(path.read_text()) for path in out.glob("trials/*/result.json")}
    losses = {name: result["validation"][-1][1] for name, result in results.items()}
    assert len(losses) == 20
    for seed in (1, 2):

        def loss(part: str, seed: int = seed) -> float:
            (found,) = (value for name, value in losses.items() if part in name and f"seed{seed}-" in name)
            return found

        models = {loss(f"upper{upper}-0pct") for upper in (0, 1, 2)}
        assert len(models) == 3, "each model computes another loss on the same samples"
        assert loss("upper2-50pct") < loss("upper2-0pct"), "healing helps"
    assert not list(out.glob("trials/*/rewired*")) and not list(out.glob("trials/adapt-*/checkpoints"))
    report = (out / "report.md").read_text()
    assert len(re.findall(r"^\| [012]", report, re.MULTILINE)) == 5
    times = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/result.json")}
    again = run_command(command, timeout=120)
    assert again.returncode == 0 and (out / "report.md").read_text() == report
    assert {path: path.stat().st_mtime_ns for path in out.glob("trials/*/result.json")} == times
