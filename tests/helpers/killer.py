"""Children that are killed at one of their calls that change the file system.

A child counts these calls, and sends itself SIGKILL before the chosen one, or after half of a write. Before a whole
call it also empties every file that was not fsynced since its last write, as a power failure may.
"""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.forks import fork

CHANGES = "os.rename os.mkdir os.rmdir os.remove os.truncate".split()
"""Events of Python's audit at which a child may die; also at files opened for writing, before and in the middle of
`write`, and before `fsync`."""


class Killer:
    """Ends this process at one point; point 0 only counts."""

    def __init__(self, point: int, torn: bool) -> None:
        self.names: list[str] = []
        self._point = point
        self._torn = torn
        self._one_at_a_time = threading.Lock()
        self._torn_descriptor, self._size_before = -1, 0
        self._unsynced: dict[int, int] = {}
        self._fsync = os.fsync

    def install(self) -> None:
        os.fsync = self._counted_fsync
        sys.addaudithook(self._audited)
        threading.setprofile(self._profiled)
        sys.setprofile(self._profiled)

    def _reached(self, name: str) -> bool:
        with self._one_at_a_time:
            self.names.append(name)
            return len(self.names) == self._point

    def _die(self) -> None:
        if not self._torn:
            for descriptor in list(self._unsynced.values()):
                os.ftruncate(descriptor, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (is_written or event in CHANGES) and self._reached(event):
            self._die()

    def _counted_fsync(self, descriptor: int) -> None:
        if self._reached("fsync"):
            self._die()
        self._fsync(descriptor)
        self._unsynced.pop(os.fstat(descriptor).st_ino, None)

    def _profiled(self, frame: object, event: str, called: Any) -> None:
        if event not in ("c_call", "c_return") or called.__name__ != "write":
            return
        file, descriptor = called.__self__, called.__self__.fileno()
        if event == "c_return":
            self._unsynced.setdefault(os.fstat(descriptor).st_ino, os.dup(descriptor))
            if descriptor == self._torn_descriptor:
                file.flush()
                os.ftruncate(descriptor, (self._size_before + os.fstat(descriptor).st_size) // 2)
                self._die()
        elif self._reached("write"):
            if not self._torn:
                self._die()
            file.flush()
            self._torn_descriptor, self._size_before = descriptor, os.fstat(descriptor).st_size


class Killed(NamedTuple):
    """A directory in which a child was killed before its `point`-th recorded call, or in the middle of that write."""

    directory: Path
    point: int
    call: str
    torn: bool


def killed_everywhere(before: Path, work: Callable[[Path], None], scratch: Path) -> Iterator[Killed]:
    """Do `work` in forked children, each killed at another point in a copy of a directory; yield what each leaves."""
    names = scratch / "names"
    output = scratch / "output"

    def work_and_die(directory: Path, point: int, torn: bool) -> int:
        def in_child() -> None:
            killer = Killer(point, torn)
            killer.install()
            work(directory)
            names.write_text(json.dumps(killer.names))

        child = fork(in_child, {}, output)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert work_and_die(Path(shutil.copytree(before, scratch / "counted")), 0, False) == 0, output.read_text()
    for point, call in enumerate(json.loads(names.read_text()), start=1):
        for torn in (False, True) if call == "write" else (False,):
            directory = Path(shutil.copytree(before, scratch / f"{point}{torn}"))
            assert work_and_die(directory, point, torn) == -signal.SIGKILL, output.read_text()
            yield Killed(directory, point, call, torn)
            shutil.rmtree(directory)
