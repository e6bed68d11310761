"""Locks of a directory held by live and by dead processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_ladder.errors import UserError
from megatron_ladder.train.record import _LOCK_NAME, save_lock
from tests.helpers.commands import REPOSITORY_ROOT

HOLDER = """
import sys, time
from pathlib import Path
from megatron_ladder.train.record import save_lock
with save_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY_ROOT,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_run_is_rejected_with_the_holder_of_the_lock(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as process:
        with pytest.raises(UserError) as rejected, save_lock(tmp_path):
            pass
        (message,) = rejected.value.messages
        who = f"pid {process.pid} on {os.uname().nodename}"
        assert message.startswith(f"--save {tmp_path}: another run writes there: {who}, started 20")
        (tmp_path / _LOCK_NAME).write_text('{"host": "el')
        with pytest.raises(UserError, match="another run writes there: it has not"), save_lock(tmp_path):
            pass
        process.kill()
        process.wait()
        # The lock of a dead process is taken over immediately.
        with save_lock(tmp_path):
            assert json.loads((tmp_path / _LOCK_NAME).read_text())["pid"] == os.getpid()
    assert (tmp_path / _LOCK_NAME).read_text() == ""
    (tmp_path / _LOCK_NAME).write_text("[" * 5000)
    with pytest.raises(UserError, match=r"run\.lock: is not a run's lock: remove it"), save_lock(tmp_path):
        pass
