"""Locks of a directory held by live processes, dead processes, and other hosts."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_ladder.errors import UserError
from megatron_ladder.processes import start_ticks
from megatron_ladder.train.lock import _LOCK_NAME, SaveLock, _this_process
from tests.helpers.commands import REPOSITORY_ROOT
from tests.helpers.patience import patient

HOLDER = """
import sys, time
from pathlib import Path
from megatron_ladder.train.lock import SaveLock
with SaveLock(Path(sys.argv[1])):
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


def write_lock(folder: Path, **changes: Any) -> None:
    (folder / _LOCK_NAME).write_text(json.dumps({**_this_process(), **changes}))


def test_a_second_run_is_rejected_with_the_holder_of_the_lock(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as process:
        with pytest.raises(UserError) as rejected, SaveLock(tmp_path):
            pass
        (message,) = rejected.value.messages
        who = f"pid {process.pid} on {os.uname().nodename}"
        assert message.startswith(f"--save {tmp_path}: another run writes there: {who}, started 20")
        process.kill()
        process.wait()
        # The lock of a dead process is taken over immediately.
        with SaveLock(tmp_path):
            assert json.loads((tmp_path / _LOCK_NAME).read_text())["pid"] == os.getpid()
    assert (tmp_path / _LOCK_NAME).read_text() == ""


def without_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_kernel_locks_the_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernel_locks(monkeypatch)
    with held_elsewhere(tmp_path), pytest.raises(UserError, match="another run writes there"), SaveLock(tmp_path):
        pass
    # The holder is dead now; a later process with the same number has another start time.
    for changes in ({}, {"pid": os.getpid(), "born": 1}, {"pid": os.getpid(), "boot": "another"}, {"pid": 2**22 + 1}):
        if changes:
            write_lock(tmp_path, **changes)
        with SaveLock(tmp_path, stale_seconds=0.05):
            pass
    write_lock(tmp_path)
    with pytest.raises(UserError, match=f"pid {os.getpid()} on"), SaveLock(tmp_path):
        pass


@pytest.mark.long
def test_a_lock_of_another_host_is_valid_while_it_is_updated(tmp_path: Path) -> None:
    write_lock(tmp_path, host="elsewhere", pid=7)
    done = threading.Event()

    def touch() -> None:
        while not done.wait(0.1):
            os.utime(tmp_path / _LOCK_NAME)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        with (
            pytest.raises(UserError, match="pid 7 on elsewhere, started 20"),
            SaveLock(tmp_path, stale_seconds=1.0, beat_seconds=0.3),
        ):
            pass
    finally:
        done.set()
        toucher.join()
    began = time.monotonic()
    with SaveLock(tmp_path, stale_seconds=1.0, beat_seconds=0.3):
        assert time.monotonic() - began > 0.5
        assert json.loads((tmp_path / _LOCK_NAME).read_text())["host"] != "elsewhere"


def test_a_lock_that_cannot_be_opened_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / _LOCK_NAME).mkdir()
    with pytest.raises(UserError, match=f"^--save {tmp_path}: run.lock: Is a directory: "), SaveLock(tmp_path):
        pass


def test_a_lock_whose_holder_is_unreadable_is_free(tmp_path: Path) -> None:
    (tmp_path / _LOCK_NAME).write_text('{"host": "el')
    with SaveLock(tmp_path):
        pass


def test_a_holder_updates_its_lock(tmp_path: Path) -> None:
    with SaveLock(tmp_path, beat_seconds=0.05):
        os.utime(tmp_path / _LOCK_NAME, (0, 0))
        deadline = time.monotonic() + patient(5)
        while (tmp_path / _LOCK_NAME).stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_zombies_and_missing_processes_have_no_start_time() -> None:
    assert start_ticks(os.getpid()) == _this_process()["born"]
    assert start_ticks(2**22 + 1) is None
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None
    child.wait()
