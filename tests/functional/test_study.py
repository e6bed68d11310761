"""The whole `tools/study.py run`: stopped, resumed, rejected, and reported."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.commands import REPOSITORY_ROOT, clean_environment, kill_tree, run_command
from tests.helpers.patience import patient

SIZE = "2x32x64x2x2x512"
FLAGS = (
    f"--sizes {SIZE} --wirings standard ladder desync-2x --timed-wirings none --seeds 1 --iterations 40 "
    "--learning-rates 1e-2 --seq-length 32 --micro-batch-size 4 --global-batch-size 8 --evaluations 2 --eval-iters 2"
).split()


def running_pretraining(folder: Path) -> list[psutil.Process]:
    """Return all processes that train for this study."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words) and "--train-iters" in words:
            found.append(process)
    return found


def start_until_it_trains(command: list[str], folder: Path) -> "subprocess.Popen[str]":
    """Start the study and return when one of its trials has saved."""
    study = subprocess.Popen(
        command,
        cwd=REPOSITORY_ROOT,
        env=clean_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + patient(240)
    before = {path: path.stat().st_size for path in folder.glob("trials/*/checkpoints/latest")}
    while {path for path in folder.glob("trials/*/checkpoints/latest")} <= set(before):
        assert study.poll() is None and time.monotonic() < deadline, study.stdout and study.stdout.read()
        time.sleep(0.05)
    return study


@pytest.mark.slow
def test_a_stopped_study_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    command = [sys.executable, "tools/study.py", "run", "--output-dir", str(folder), *FLAGS]
    study = start_until_it_trains(command, folder)
    try:
        study.send_signal(signal.SIGTERM)
        printed, _ = study.communicate(timeout=patient(120))
    finally:
        kill_tree(study)
    assert study.returncode == 0 and "the same command resumes the study" in printed
    assert running_pretraining(folder) == []

    rejected = run_command([*command, "--iterations", "41"], timeout=120)
    assert rejected.returncode == 2 and "iterations: was 40, now 41" in rejected.stderr

    done = run_command(command, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("trials/*/result.json")}
    assert sorted(result["trial"]["wiring"] for result in results.values()) == ["desync-2x", "ladder", "standard"]
    for result in results.values():
        assert [step for step, _ in result["validation"]] == [20, 40]
    assert (folder / "report.md").is_file() and list(folder.glob("*.png"))
    assert not list(folder.glob("trials/*/checkpoints"))

    times = {path: path.stat().st_mtime_ns for path in folder.glob("trials/*/result.json")}
    again = run_command(command, timeout=120)
    assert again.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("trials/*/result.json")} == times
