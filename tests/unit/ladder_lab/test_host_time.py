"""The counts of the host's work per layer, compared with closed forms."""

import re
import sys

import pytest

from tests.helpers.commands import REPOSITORY_ROOT, run_command


@pytest.mark.parametrize(
    ("case", "wiring", "kernels", "collectives"),
    [("decode", "ladder", 17, 2), ("decode", "ladder-parallel", 17, 1), ("train", "ladder", 48, 4)],
)
def test_a_layer_launches_few_kernels_and_the_reduces_of_its_wiring(
    case: str, wiring: str, kernels: int, collectives: int
) -> None:
    """Decoding: norms and additions 4, products 4, rotation 4, cache 2, attention 1, SwiGLU 2."""
    command = [sys.executable, "tools/host_time.py", "--case", case, "--wiring", wiring, "--rounds", "1"]
    done = run_command(command, cwd=REPOSITORY_ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    (row,) = re.findall(r"^\| one layer \| (\d+) \| \d+ \| (\d+) \|", done.stdout, re.MULTILINE)
    assert (int(row[0]) <= kernels, int(row[1])) == (True, collectives), done.stdout
