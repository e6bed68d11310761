"""Output to a terminal that is gone, and to a full disk."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from megatron_ladder.train import opening
from megatron_ladder.train.log import print_rank_0
from tests.helpers.commands import REPOSITORY_ROOT

PROGRAM = """
import contextlib
from megatron_ladder.errors import run_program

def main(argv):
    with contextlib.suppress(OSError):
        print("lost", flush=True)

run_program(main)
"""


class HungUp(io.StringIO):
    """A terminal that is gone."""

    def flush(self) -> NoReturn:
        raise OSError(5, "Input/output error")


def test_text_that_cannot_be_printed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", HungUp())
    print_rank_0("lost", 0)


def test_a_configuration_that_cannot_be_written_is_reported_if_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").mkdir()
    monkeypatch.setattr(opening, "config_file_text", lambda values, note: "")
    monkeypatch.setattr(sys, "stdout", HungUp())
    opening._write_config(tmp_path, SimpleNamespace(run=SimpleNamespace(world_size=1), values={}))  # type: ignore[arg-type]


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
