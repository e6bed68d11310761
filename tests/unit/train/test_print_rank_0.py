"""Output to a terminal that is gone, and to a full disk."""

import subprocess
import sys

from tests.helpers.commands import REPOSITORY_ROOT

PROGRAM = """
import contextlib
from megatron_ladder.errors import run_program

def main(argv):
    with contextlib.suppress(OSError):
        print("lost", flush=True)

run_program(main)
"""


def test_a_run_succeeds_if_its_last_line_cannot_be_printed() -> None:
    # A file on a full disk fails in the same call as a terminal that has hung up.
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=REPOSITORY_ROOT,
            env={"RANK": "0"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (0, "")
