"""Locks of a directory held by live and by dead processes."""

import json
import os
import sys
from pathlib import Path

import pytest

from megatron_ladder.errors import UserError
from megatron_ladder.train.record import _LOCK_NAME, save_lock
from tests.helpers.commands import Command, kill_tree, running

HOLDER = """
import signal, sys
from pathlib import Path
from megatron_ladder.train.record import save_lock
with save_lock(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


def test_a_second_run_is_rejected_with_the_holder_of_the_lock(tmp_path: Path) -> None:
    holder = Command([sys.executable, "-c", HOLDER, tmp_path], tmp_path / "holder")
    with running(holder):
        holder.wait_for("held\n", 60)
        with pytest.raises(UserError) as rejected, save_lock(tmp_path):
            pass
        (message,) = rejected.value.messages
        who = f"pid {holder.process.pid} on {os.uname().nodename}"
        assert message.startswith(f"--save {tmp_path}: another run writes there: {who}, started 20")
        (tmp_path / _LOCK_NAME).write_text('{"host": "el')
        with pytest.raises(UserError, match="another run writes there: it has not"), save_lock(tmp_path):
            pass
        kill_tree(holder.process)
        # The lock of a dead process is taken over immediately.
        with save_lock(tmp_path):
            assert json.loads((tmp_path / _LOCK_NAME).read_text())["pid"] == os.getpid()
    assert (tmp_path / _LOCK_NAME).read_text() == ""
    (tmp_path / _LOCK_NAME).write_text("[" * 5000)
    with pytest.raises(UserError, match=r"run\.lock: is not a run's lock: remove it"), save_lock(tmp_path):
        pass
