"""Ensures that only one run at a time writes to a directory of checkpoints.

    SAVE/run.lock       {"host", "boot", "pid", "born", "started"} of the run that writes here; empty if none does

The kernel's lock on that file decides on one machine, and on file systems that share locks between machines. On other
file systems the content decides: on the same machine, whether the process is alive; for another machine, whether the
file's modification time still changes, because the holder updates it every few seconds. No clocks are compared.
"""

import contextlib
import json
import os
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil

from megatron_ladder.errors import UserError
from megatron_ladder.files import lock_file
from megatron_ladder.processes import boot_id, start_ticks

_LOCK_NAME = "run.lock"
_MOST_BYTES = 4096
"""Maximum size of a lock file."""


class SaveLock:
    """Context manager around a run that writes to `folder`; one process of the run enters it."""

    def __init__(
        self, folder: Path, stale_seconds: float = 45.0, beat_seconds: float = 10.0, flag: str = "--save"
    ) -> None:
        """A lock of another machine counts as dead after `stale_seconds` without an update; `flag` names the folder."""
        self._folder = folder
        self._flag = flag
        self._path = folder / _LOCK_NAME
        self._stale_seconds = stale_seconds
        self._beat_seconds = beat_seconds
        self._descriptor = -1
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="save lock", daemon=True)

    def __enter__(self) -> Self:
        """Acquire the lock, or take over that of a dead run; raises UserError with the holder if another run has it."""
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            fix = "remove the file, or give another directory"
            raise UserError(f"{self._flag} {self._folder}: {_LOCK_NAME}: {error.strerror}: {fix}") from None
        try:
            try:
                has_kernel_locks = lock_file(self._descriptor) is None
            except BlockingIOError:
                raise self._refusal(self._read()) from None
            holder, me = self._read(), _this_process()
            if holder and self._is_alive(holder, me):
                raise self._refusal(holder)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(me).encode(), 0)
            os.fsync(self._descriptor)
            if not has_kernel_locks:
                # Two processes that found the same dead lock have both written; the content of the later one remains.
                time.sleep(min(1.0, self._stale_seconds))
                if self._read() != me:
                    raise self._refusal(self._read())
        except BaseException:
            os.close(self._descriptor)
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _is_alive(self, holder: dict[str, Any], me: dict[str, Any]) -> bool:
        """Return whether the holder's process is alive; on another host, wait until its lock is updated or stale."""
        if holder.get("host") == me["host"]:
            same_boot = holder.get("boot") == me["boot"]
            return same_boot and holder.get("born") == start_ticks(int(holder.get("pid", -1)))
        changed, deadline = os.fstat(self._descriptor).st_mtime_ns, time.monotonic() + self._stale_seconds
        while os.stat(self._path).st_mtime_ns == changed:
            if (remaining := deadline - time.monotonic()) <= 0:
                return False
            print(f"{self._path}: lock of another host: waiting {remaining:.0f} s for an update", flush=True)
            time.sleep(min(self._beat_seconds, remaining))
        return True

    def _refusal(self, holder: dict[str, Any]) -> UserError:
        who = "pid {pid} on {host}, started {started}".format_map({**dict.fromkeys(_this_process(), "?"), **holder})
        where = f"{self._flag} {self._folder}"
        return UserError(f"{where}: another run writes there: {who}: end it, or give another directory")

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            found = json.loads(os.pread(self._descriptor, _MOST_BYTES, 0))
            if isinstance(found, dict):
                return found
        return {}

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)


def _this_process() -> dict[str, Any]:
    seconds = psutil.Process().create_time()
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
        "born": start_ticks(os.getpid()),
        "started": datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds"),
    }
