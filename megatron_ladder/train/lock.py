"""Ensures that only one run at a time writes to a directory of checkpoints.

    SAVE/run.lock       {"host", "pid", "started"} of the run that writes here; empty if none does

The kernel's lock on that file decides, also between machines if their file system shares locks. It ends with its
holder. On a file system without locks there is only a warning.
"""

import contextlib
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import psutil

from megatron_ladder.errors import UserError
from megatron_ladder.files import lock_file

_LOCK_NAME = "run.lock"
_MOST_BYTES = 4096
"""Size of a lock file, at most."""


class SaveLock:
    """Context manager around a run that writes to `folder`; one process of the run enters it."""

    def __init__(self, folder: Path, flag: str = "--save") -> None:
        """`flag` names the folder in messages."""
        self._where = f"{flag} {folder}"
        self._path = folder / _LOCK_NAME
        self._descriptor = -1

    def __enter__(self) -> Self:
        """Acquire the lock; raises UserError with the holder if another run has it."""
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            fix = "remove the file, or give another directory"
            raise UserError(f"{self._where}: {_LOCK_NAME}: {error.strerror}: {fix}") from None
        try:
            problem = lock_file(self._descriptor)
        except BlockingIOError:
            holder = self._holder()
            os.close(self._descriptor)
            raise UserError(
                f"{self._where}: another run writes there: {holder}: end it, or give another directory"
            ) from None
        if problem is not None:
            advice = "make sure that no other run writes there"
            print(f"*** {self._where}: this file system has no locks ({problem.strerror}): {advice} ***", flush=True)
        if os.fstat(self._descriptor).st_size > _MOST_BYTES:
            os.close(self._descriptor)
            raise UserError(f"{self._where}: {_LOCK_NAME}: is not a run's lock: remove it, or give another directory")
        started = datetime.fromtimestamp(psutil.Process().create_time(), UTC).isoformat(timespec="seconds")
        me = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        # The content is only for messages, so a full disk does not matter.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(me).encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _holder(self) -> str:
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            return "pid {pid} on {host}, started {started}".format_map(json.loads(self._path.read_bytes()))
        return "it has not written its name yet"
