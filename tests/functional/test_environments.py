"""Scripts that test the project in other environments, and the checks of `tests/gpu.sh` on a CPU."""

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import run_command

GPU_MINUTES = 15


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["tests/wheel.sh", "tests/lm_eval.sh", "tests/modeling_common.sh", "vllm_plugin/test.sh"]
)
def test_a_script_passes_in_its_environment(script: str) -> None:
    # Installers read their settings, such as a mirror, from the variables of the user.
    done = run_command(["bash", script], timeout=3600, env=os.environ)
    if done.returncode == 77:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_every_gpu_check_passes_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.md"
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--minutes", str(GPU_MINUTES), "--output", output]
    done = run_command(command, timeout=60 * GPU_MINUTES + 60)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.read_text().splitlines() if "|" in line]
    assert len(rows) > 20
    # torchtitan is not among the packages of the tests, and a compiler is optional.
    others = [row for row in rows[2:] if row[2] != "passed"]
    assert all(row[2] == "not run" and ("torchtitan" in row[3] or "compiler" in row[3]) for row in others), others
