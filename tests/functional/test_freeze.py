"""The product's results equal the record that `tests.freeze` keeps of them."""

import sys

import pytest

from tests.helpers.commands import run_command

QUICK = "data training/ladder-tp2 order/blend-dp2 generate/ladder"


@pytest.mark.parametrize("names", [QUICK, pytest.param("*", marks=pytest.mark.slow)])
def test_results_equal_the_record(names: str) -> None:
    done = run_command([sys.executable, "-m", "tests.freeze", "check", *names.split()], timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
