"""SIGKILL at every file-system call of a save.

A child is forked for each point. It counts the calls that change the file system, and sends itself SIGKILL before the
chosen one, or after half of a write. Before a whole call it also empties every file that was not fsynced since its
last write, as a power failure may.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.publish import Retention, published_checkpoints
from megatron_ladder.checkpoint.saving import HostMemory
from megatron_ladder.comm.group import CommGroup
from tests.helpers.forks import fork
from tests.unit.checkpoint.tiny_training import TinyState, begin, hand_over, holds, on_ranks, save_at_once

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


def save_in_background(save: Path, iteration: int, seed: int, retention: Retention) -> None:
    """Save from two ranks whose state changes while files are written."""

    def rank(world: CommGroup) -> None:
        state = TinyState(seed, world.rank, world.size)
        saving = begin(save, iteration, state, world, retention=retention, host=HostMemory())
        state.train()
        hand_over(saving, world)

    failures = [answer for answer in on_ranks(2, rank) if answer is not None]
    assert not failures, failures


def save_alone(save: Path, iteration: int, seed: int, retention: Retention) -> None:
    save_at_once(save, iteration, TinyState(seed), CommGroup.alone(), retention=retention)


SCENARIOS: dict[str, tuple[Callable[..., None], int, Retention]] = {
    "again": (save_alone, 100, Retention(keep_last=1)),
    "background": (save_in_background, 200, Retention(keep_last=2)),
}
"""Function, iteration and retention of the killed save; iterations 50 and 100 exist before."""


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["again", pytest.param("background", marks=pytest.mark.slow)])
def test_a_save_may_be_killed_anywhere(tmp_path: Path, scenario: str) -> None:
    """`latest` names a complete checkpoint, the old or the new one, and the next save cleans up."""
    save, iteration, retention = SCENARIOS[scenario]
    old, new, newest = (TinyState(seed).whole for seed in (1, 2, 3))
    before, names, output = (tmp_path / name for name in ("before", "names", "output"))
    for earlier in (50, 100):
        save_alone(before, earlier, 1, Retention())

    def save_and_die(directory: Path, point: int, torn: bool) -> int:
        def work() -> None:
            killer = Killer(point, torn)
            killer.install()
            save(directory, iteration, 2, retention)
            names.write_text(json.dumps(killer.names))

        child = fork(work, {}, output)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert save_and_die(Path(shutil.copytree(before, tmp_path / "counted")), 0, False) == 0, output.read_text()
    points = json.loads(names.read_text())
    outcomes = []
    for point, name in enumerate(points, start=1):
        for torn in (False, True) if name == "write" else (False,):
            directory = Path(shutil.copytree(before, tmp_path / f"{point}{torn}"))
            assert save_and_die(directory, point, torn) == -signal.SIGKILL, output.read_text()
            is_new = holds(directory, new)
            assert is_new or holds(directory, old), (point, name, torn)
            outcomes.append(is_new)
            for earlier in published_checkpoints(directory):
                Checkpoint.open(directory / earlier)
            # Wait for the next tick of a coarse file-system clock.
            time.sleep(0.005)
            save_alone(directory, 300, 3, retention)
            assert holds(directory, newest)
            assert all(entry.name in ("latest", *published_checkpoints(directory)) for entry in directory.iterdir())
            shutil.rmtree(directory)
    assert len(points) >= 20 and {"open", "write", "fsync"} <= set(points) and points.count("os.rename") >= 3
    assert set(outcomes) == {False, True}
    if scenario == "again":
        # A new checkpoint stays once it exists; the order of threads is not fixed.
        assert outcomes == sorted(outcomes) and {"os.remove", "os.rmdir"} <= set(points)
