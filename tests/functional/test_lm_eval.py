"""The model for lm-eval, in an environment with lm-eval."""

import subprocess

import pytest

from tests.helpers.commands import REPOSITORY_ROOT
from tests.helpers.patience import patient


@pytest.mark.slow
def test_the_model_for_lm_eval_passes_its_tests() -> None:
    done = subprocess.run(
        ["bash", REPOSITORY_ROOT / "tests" / "lm_eval.sh"],
        capture_output=True,
        text=True,
        timeout=patient(1800),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
