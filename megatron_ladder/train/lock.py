"""One run at a time in a directory of checkpoints.

    SAVE/run.lock       {"host", "boot", "pid", "born", "started"} of the run that writes here; empty if none does

The kernel's lock on that file (`flock`) settles it on one machine, and on file systems that carry it between machines.
Where they do not, the holder's words do: on the same machine its process lives or not; of another machine the file
counts as held for as long as its time of change moves, which its holder sees to every few seconds.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from megatron_ladder.errors import UserError

LOCK_NAME = "run.lock"
BEAT_SECONDS = 10.0
"""How often a holder touches its lock."""
STALE_SECONDS = 45.0
"""A lock of another machine that was not touched for so long is a dead run's."""
MOST_BYTES = 4096
"""Of a lock file."""


class SaveLock:
    """`with SaveLock(folder):` around a run that writes to `folder`; one process of the run does it."""

    def __init__(
        self,
        folder: Path,
        stale_seconds: float = STALE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        flag: str = "--save",
    ) -> None:
        """`flag`: by which the folder was given."""
        self._folder = folder
        self._flag = flag
        self._path = folder / LOCK_NAME
        self._stale_seconds = stale_seconds
        self._beat_seconds = beat_seconds
        self._descriptor = -1
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="save lock", daemon=True)

    def __enter__(self) -> Self:
        """Takes the lock, a dead run's too.

        Raises:
            UserError: another run holds it; its host, pid and start are told.
        """
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            kernel_locks = self._flock()
            holder = self._read()
            if holder and self._is_alive(holder):
                raise self._refusal(holder)
            self._write(this_process())
            if not kernel_locks:
                # Two that found the same dead lock have both written; the later one's words stay.
                time.sleep(min(1.0, self._stale_seconds))
                if self._read() != this_process():
                    raise self._refusal(self._read())
        except BaseException:
            os.close(self._descriptor)
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _flock(self) -> bool:
        """Whether the file system has such locks; raises UserError if another process has this one."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._refusal(self._read()) from None
            return False
        return True

    def _is_alive(self, holder: dict[str, Any]) -> bool:
        me = this_process()
        if holder.get("host") == me["host"]:
            same_boot = holder.get("boot") == me["boot"]
            return same_boot and holder.get("born") == born(int(holder.get("pid", -1)))
        return not self._goes_stale()

    def _goes_stale(self) -> bool:
        """Whether the file's time of change stays, by the file server's clock, until it is old enough."""
        changed = os.fstat(self._descriptor).st_mtime
        while True:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=LOCK_NAME) as probe:
                age = os.fstat(probe.fileno()).st_mtime - changed
            if age >= self._stale_seconds:
                return True
            print(f"{self._path}: another host's lock, {age:.0f} s old: waits whether it is touched", flush=True)
            time.sleep(min(self._beat_seconds, self._stale_seconds - age + 0.1))
            if os.stat(self._path).st_mtime != changed:
                return False

    def _refusal(self, holder: dict[str, Any]) -> UserError:
        who = "pid {pid} on {host}, started {started}".format_map({**dict.fromkeys(this_process(), "?"), **holder})
        where = f"{self._flag} {self._folder}"
        return UserError(f"{where}: another run writes there: {who}: end it, or give another directory")

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            found = json.loads(os.pread(self._descriptor, MOST_BYTES, 0))
            if isinstance(found, dict):
                return found
        return {}

    def _write(self, holder: dict[str, Any]) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        os.fsync(self._descriptor)

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)


def this_process() -> dict[str, Any]:
    """What tells this process from all others: host, boot, pid, and when it was born."""
    seconds = psutil.Process().create_time()
    return {
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid": os.getpid(),
        "born": born(os.getpid()),
        "started": datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds"),
    }


def born(pid: int) -> int | None:
    """Clock ticks from the machine's boot to the start of a process; None if there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # proc(5): the state is the third field and the start time the 22nd; two stand before the parenthesis.
    return None if fields[0] in "ZX" else int(fields[19])
