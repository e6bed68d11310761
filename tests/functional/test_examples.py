"""The functions that the example scripts share."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import REPOSITORY_ROOT, run_command, write_nvidia_smi, write_program

(VERSION,) = re.findall(r"^torch==(.+)$", (REPOSITORY_ROOT / "constraints.txt").read_text(), re.MULTILINE)


def run_script(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run functions of the shared scripts, for which the programs of a folder come first."""
    path = f"{folder}:{os.environ['PATH']}"
    words = ["bash", "-c", f"set -euo pipefail; source {REPOSITORY_ROOT}/examples/environment.sh; {script}"]
    return run_command(words, timeout=60, env={"PATH": path, **variables})


def test_gpus_are_counted_however_slowly_they_are_listed(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, gpus=3)
    done = run_script("gpu_count", tmp_path)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert run_script("gpu_count", tmp_path, CUDA_VISIBLE_DEVICES="0,2").stdout == "2\n"


@pytest.mark.parametrize(
    ("machine", "has_build", "expected", "code"),
    [
        ({"driver": "580.65.06", "gpus": 8}, True, f"install_packages torch=={VERSION}\n", 0),
        ({"driver": "550.54.15", "gpus": 8}, True, f"install_packages torch=={VERSION}+cu126\n", 0),
        ({"driver": "550.54.15", "gpus": 8}, False, f"--torch-backend cu126 torch=={VERSION}\n", 0),
        ({"driver": "470.82.01", "gpus": 1}, True, "error: driver 470.82.01 of this machine's GPUs is too old", 2),
        (
            {"driver": "575.57.08", "gpus": 2, "capability": "12.0"},
            True,
            "error: driver 575.57.08 is too old for a GPU of capability 12.0: update it to 580 or newer",
            2,
        ),
        ({"driver": "580.65.06", "gpus": 2, "capability": "12.0"}, True, f"install_packages torch=={VERSION}\n", 0),
        ({"gpus": 0}, True, f"install_packages torch=={VERSION}+cpu\n", 0),
        ({"gpus": 0}, True, "the CPU, because nvidia-smi failed: it couldn't communicate with the driver\n", 0),
        ({"gpus": 0}, False, f"--torch-backend cpu torch=={VERSION}\n", 0),
        (None, True, f"install_packages torch=={VERSION}+cpu\n", 0),
    ],
)
def test_the_build_of_torch_suits_the_driver(
    tmp_path: Path, machine: dict[str, Any] | None, has_build: bool, expected: str, code: int
) -> None:
    if machine is not None:
        write_nvidia_smi(tmp_path, **machine)
    # The package index has a build with a local version or not; what is installed is only printed.
    script = f"""ENVIRONMENT={tmp_path}
        has_version() {{ false; }}
        attempt() {{ shift; echo "$@"; [[ "$*" != *torch==*+* ]] || {str(has_build).lower()}; }}
        install_torch"""
    done = run_script(script, tmp_path)
    assert done.returncode == code, done.stderr
    assert expected in (done.stderr if code else done.stdout)


@pytest.mark.parametrize(
    ("installed", "driver", "is_replaced"),
    [
        ("2.13.0+cu126", "580.65.06 on Blackwell", True),
        ("2.13.0+cu129", "580.65.06 on Blackwell", False),
        ("2.13.0+cpu", "580.65.06", True),
        ("2.13.0+cpu", None, False),
        ("2.13.0", "580.65.06", False),
        ("2.13.0", "550.54.15", True),
        ("2.13.0+cu130", "550.54.15", True),
        ("2.13.0+cu126", "550.54.15", False),
    ],
)
def test_a_build_that_cannot_use_the_gpus_is_replaced(
    tmp_path: Path, installed: str, driver: str | None, is_replaced: bool
) -> None:
    if driver is not None:
        version, _, is_blackwell = driver.partition(" on ")
        write_nvidia_smi(tmp_path, gpus=2, driver=version, capability="10.0" if is_blackwell else "9.0")
    (tmp_path / f"lib/python3.12/site-packages/torch-{installed}.dist-info").mkdir(parents=True)
    done = run_script(f"ENVIRONMENT={tmp_path}; if lacks_cuda; then echo replaced; fi", tmp_path)
    assert (done.returncode, done.stdout) == (0, "replaced\n" * is_replaced), done.stderr


def test_scripts_of_packages_start_in_a_path_with_a_blank(tmp_path: Path) -> None:
    programs = tmp_path / "a b" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    write_program(programs / "tool", f'#!{programs}/python\nimport sys\n\nprint(sys.argv[1:], "\\\\")\n')
    for _ in range(2):
        assert run_script(f"ENVIRONMENT='{programs.parent}'; repair_scripts", tmp_path).returncode == 0
        done = run_command([programs / "tool", "c d", "$e"], timeout=60)
        assert (done.returncode, done.stdout) == (0, "['c d', '$e'] \\\n"), done.stderr


@pytest.mark.parametrize(
    ("newest", "is_finished"), [("iter_0000200", True), ("iter_0000200.2", True), ("iter_0000040", False)]
)
def test_a_training_run_that_stopped_early_is_not_finished(tmp_path: Path, newest: str, is_finished: bool) -> None:
    """A stage is recorded as done only if the run reached its last step."""
    (tmp_path / "done").mkdir()
    (tmp_path / "checkpoint").mkdir()
    script = f"""run={tmp_path} stages=1
        source {REPOSITORY_ROOT}/examples/stages.sh
        launch() {{
            echo "$@"
            echo {newest} >"$run/checkpoint/latest"
            echo "train_iters: 200" >"$run/checkpoint/config.yaml"
        }}
        run_once training "$run/checkpoint/latest" Training train "$run/checkpoint" pretrain_ladder.py --lr 1"""
    done = run_script(script, tmp_path)
    assert "pretrain_ladder.py --lr 1" in done.stdout
    assert (done.returncode == 0, (tmp_path / "done" / "training").exists()) == (is_finished, is_finished), done.stderr
    assert is_finished or "training stopped at iter_0000040 of 200 steps" in done.stderr
