"""The counts of the host's work per layer, compared with closed forms."""

import json
import re
import sys

from tests.helpers.commands import run_command

PROGRAM = "import json, sys; from tools.host_time import main; [main(words) for words in json.loads(sys.argv[1])]"
CASES = {("decode", "ladder"): (17, 2), ("decode", "ladder-parallel"): (17, 1), ("train", "ladder"): (48, 4)}
"""The most kernels of a layer, and its collectives."""


def test_a_layer_launches_few_kernels_and_the_reduces_of_its_wiring() -> None:
    """Decoding: norms and additions 4, products 4, rotation 4, cache 2, attention 1, SwiGLU 2."""
    lines = [f"--case {case} --wiring {wiring} --rounds 1".split() for case, wiring in CASES]
    done = run_command([sys.executable, "-c", PROGRAM, json.dumps(lines)], timeout=120)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| one layer \| (\d+) \| \d+ \| (\d+) \|", done.stdout, re.MULTILINE)
    for (kernels, collectives), (most, expected) in zip(rows, CASES.values(), strict=True):
        assert int(kernels) <= most and int(collectives) == expected, done.stdout
