"""The functions that the example scripts share."""

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import REPOSITORY_ROOT, run_command

NVIDIA_SMI = """#!/bin/bash
for number in 0 1 2; do
    echo "GPU $number: a GPU" || exit
    sleep 0.05
done
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_gpus_are_counted_however_slowly_they_are_listed(tmp_path: Path) -> None:
    write_program(tmp_path / "nvidia-smi", NVIDIA_SMI)
    script = f"set -euo pipefail; source {REPOSITORY_ROOT}/examples/environment.sh; gpu_count"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run_command(["bash", "-c", f"unset CUDA_VISIBLE_DEVICES; {script}"], timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    done = run_command(["bash", "-c", f"CUDA_VISIBLE_DEVICES=0,2; {script}"], timeout=60, env=environment)
    assert done.stdout == "2\n"


def test_scripts_of_packages_start_in_a_path_with_a_blank(tmp_path: Path) -> None:
    programs = tmp_path / "a b" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    write_program(programs / "tool", f'#!{programs}/python\nimport sys\n\nprint(sys.argv[1:], "\\\\")\n')
    script = f"source {REPOSITORY_ROOT}/examples/environment.sh; ENVIRONMENT='{programs.parent}'; repair_scripts"
    for _ in range(2):
        assert run_command(["bash", "-c", f"set -euo pipefail; {script}"], timeout=60).returncode == 0
        done = run_command([programs / "tool", "c d", "$e"], timeout=60)
        assert (done.returncode, done.stdout) == (0, "['c d', '$e'] \\\n"), done.stderr


@pytest.mark.parametrize(
    ("newest", "is_finished"), [("iter_0000200", True), ("iter_0000200.2", True), ("iter_0000040", False)]
)
def test_a_training_run_that_stopped_early_is_not_finished(tmp_path: Path, newest: str, is_finished: bool) -> None:
    """A stage is recorded as done only if the run reached its last step."""
    (tmp_path / "done").mkdir()
    (tmp_path / "checkpoint").mkdir()
    script = f"""set -euo pipefail
        run={tmp_path} stages=1
        source {REPOSITORY_ROOT}/examples/stages.sh
        launch() {{
            echo "$@"
            echo {newest} >"$run/checkpoint/latest"
            echo "train_iters: 200" >"$run/checkpoint/config.yaml"
        }}
        run_once training "$run/checkpoint/latest" Training train "$run/checkpoint" pretrain_ladder.py --lr 1"""
    done = run_command(["bash", "-c", script], timeout=60)
    assert "pretrain_ladder.py --lr 1" in done.stdout
    assert (done.returncode == 0, (tmp_path / "done" / "training").exists()) == (is_finished, is_finished), done.stderr
    assert is_finished or "training stopped at iter_0000040 of 200 steps" in done.stderr
