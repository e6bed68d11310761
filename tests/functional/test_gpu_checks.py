"""The checks of `tests/gpu.sh` on a CPU."""

import sys
from pathlib import Path

import pytest

from tests.helpers.commands import run_command

MINUTES = 15


@pytest.mark.slow
def test_every_check_passes_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.md"
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--minutes", str(MINUTES), "--output", output]
    done = run_command(command, timeout=60 * MINUTES + 60)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.read_text().splitlines() if "|" in line]
    assert len(rows) > 25
    # A compiler is optional.
    others = [row for row in rows[2:] if row[2] != "passed"]
    assert all(row[2] == "not run" and "compiler" in row[3] for row in others), others
