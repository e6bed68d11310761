"""SIGKILL at every file-system call of a save.

A child is forked for each point. It counts the calls that change the file system, and sends itself SIGKILL before the
chosen one, or after half of a write. Before a whole call it also empties every file that was not fsynced since its
last write, as a power failure may.
"""

import builtins
import io
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
from tests.unit.checkpoint.tiny_training import TinyState, begin, hand_over, holds, on_ranks, save_at_once

CHANGES = "open fsync rename replace mkdir makedirs rmdir unlink remove truncate sendfile".split()
"""Functions of `os` at which a child may die; also before and in the middle of `write`."""


class Killer:
    """Patches this process so that it dies at one point; point 0 only counts."""

    def __init__(self, point: int, torn: bool) -> None:
        self.names: list[str] = []
        self._point = point
        self._torn = torn
        self._one_at_a_time = threading.Lock()
        self._unsynced: dict[int, int] = {}
        self._real = {name: getattr(os, name) for name in (*CHANGES, "write")}

    def install(self) -> None:
        for name in CHANGES:
            setattr(os, name, self._counted(name))
        os.write = self._write
        self._real_open = io.open
        builtins.open = io.open = self._open

    def _reached(self, name: str) -> bool:
        with self._one_at_a_time:
            self.names.append(name)
            return len(self.names) == self._point

    def _die(self) -> None:
        if not self._torn:
            for descriptor in list(self._unsynced.values()):
                os.ftruncate(descriptor, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def _counted(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._reached(name):
                self._die()
            result = self._real[name](*arguments, **named)
            if name == "fsync":
                self._unsynced.pop(os.fstat(arguments[0]).st_ino, None)
            return result

        return call

    def wrote(self, descriptor: int) -> None:
        self._unsynced.setdefault(os.fstat(descriptor).st_ino, os.dup(descriptor))

    def about_to_write(self, write: Callable[[Any], Any], data: Any) -> None:
        if self._reached("write"):
            if self._torn:
                write(data[: len(data) // 2])
            self._die()

    def _write(self, descriptor: int, data: Any) -> int:
        self.about_to_write(lambda part: self._real["write"](descriptor, part), data)
        self.wrote(descriptor)
        return self._real["write"](descriptor, data)

    def _open(self, path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if not set(mode) & set("wxa+"):
            return self._real_open(path, mode, *arguments, **named)
        if self._reached("open"):
            self._die()
        return KillingFile(self._real_open(path, mode, *arguments, **named), self)


class KillingFile:
    """A file whose writes are counted."""

    def __init__(self, file: Any, killer: Killer) -> None:
        self._file = file
        self._killer = killer

    def write(self, data: Any) -> int:
        def at_once(part: Any) -> None:
            self._file.write(part)
            self._file.flush()

        self._killer.about_to_write(at_once, data)
        self._killer.wrote(self._file.fileno())
        return self._file.write(data)

    def __enter__(self) -> "KillingFile":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


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


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a fork; return the number of the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["again", pytest.param("background", marks=pytest.mark.slow)])
def test_a_save_may_be_killed_anywhere(tmp_path: Path, scenario: str) -> None:
    """`latest` names a complete checkpoint, the old or the new one, and the next save cleans up."""
    save, iteration, retention = SCENARIOS[scenario]
    old, new, newest = (TinyState(seed).whole for seed in (1, 2, 3))
    before, names = tmp_path / "before", tmp_path / "names"
    for earlier in (50, 100):
        save_alone(before, earlier, 1, Retention())

    def dying(directory: Path, point: int, torn: bool) -> Callable[[], None]:
        def work() -> None:
            killer = Killer(point, torn)
            killer.install()
            save(directory, iteration, 2, retention)
            with killer._real_open(names, "w") as file:
                json.dump(killer.names, file)

        return work

    assert in_child(dying(Path(shutil.copytree(before, tmp_path / "counted")), 0, False)) == 0
    points = json.loads(names.read_text())
    outcomes = []
    for point, name in enumerate(points, start=1):
        for torn in (False, True) if name == "write" else (False,):
            directory = Path(shutil.copytree(before, tmp_path / f"{point}{torn}"))
            assert in_child(dying(directory, point, torn)) == signal.SIGKILL
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
    assert len(points) >= 20 and {"open", "write", "fsync", "rename", "replace"} <= set(points)
    assert set(outcomes) == {False, True}
    if scenario == "again":
        # A new checkpoint stays once it exists; the order of threads is not fixed.
        assert outcomes == sorted(outcomes) and {"unlink", "rmdir"} <= set(points)
