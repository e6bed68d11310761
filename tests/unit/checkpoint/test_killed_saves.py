"""SIGKILL at every file-system call of a save: `latest` names a complete checkpoint, the old or the new one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patient

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["again", pytest.param("background", marks=pytest.mark.slow)])
def test_a_save_may_be_killed_anywhere(tmp_path: Path, scenario: str) -> None:
    """Before a write, in the middle of a write, and with the loss of everything that was not fsynced."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.checkpoint.kill_sweep", str(tmp_path), scenario],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)[scenario]
    points, outcomes = found["points"], found["outcomes"]
    assert len(points) >= 20 and {"open", "write", "fsync", "rename", "replace"} <= set(points)
    assert set(outcomes) == {False, True}
    if scenario == "again":
        # A new checkpoint stays once it exists; the order of threads is not fixed.
        assert outcomes == sorted(outcomes) and {"unlink", "rmdir"} <= set(points)
