"""The faults of `run.py`: a few in every test run, many in slow runs."""

import sys

import pytest

from tests.helpers.commands import run_command
from tests.helpers.patience import patient

BITWISE = "bitwise those of the uninterrupted run"


def chaos(flags: str, timeout: float) -> list[str]:
    """Run the script and return its lines; it fails at the first unexpected outcome."""
    command = [sys.executable, "tests/chaos/run.py", *flags.split(), "--patience", str(patient(1))]
    done = run_command(command, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    return done.stdout.splitlines()


def test_a_few_faults() -> None:
    """One process for all of them: a start costs as much as a fault."""
    faults = {"tp": ["kill", "term"], "pp": ["kill"], "dp": ["kill"]}
    each = [f"{layout}:{fault}" for layout, names in faults.items() for fault in names]
    lines = chaos(f"--faults {' '.join(each)} --kills 2 --seed 3", timeout=600)
    assert [line.split(":")[0] for line in lines] == [fault.replace(":", " ") for fault in each]
    assert all("2 kills" in line and BITWISE in line for line in lines if " kill:" in line)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "pp", "dp"])
def test_many_faults(layout: str) -> None:
    lines = chaos(f"--layouts {layout} --kills 30 --seed 4", timeout=1500)
    assert len(lines) == 2 and "30 kills" in lines[0] and BITWISE in lines[0]
