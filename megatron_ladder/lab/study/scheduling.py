"""Processes side by side, in so many slots, of which none outlives the one that started them.

They are started in their order: one that needs more slots than are free waits for them, and the next ones behind it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.2
GRACE_SECONDS = 120.0
"""From asking a job to end, for which it saves, until it is ended."""
PR_SET_PDEATHSIG = 1
"""Of <linux/prctl.h>: the signal that the kernel sends to a process when its parent is gone."""


@dataclass(frozen=True)
class Job:
    """A command to be run."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    output: Path
    """File that gets what it prints, after what is there."""
    slots: int


@contextmanager
def noting_signals() -> Iterator[list[int]]:
    """Inside it, signals that end a process are noted in the list, and nothing else comes of them.

    One that the parent has set to be ignored, as nohup does, stays so.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    heard = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Pool:
    """Slots for jobs.

    Args:
        slots: that there are; a job that needs more takes all of them.
        received: signals that ask for the end, as they come. The first one is handed on to the jobs as SIGTERM, and
            the second one ends them at once.
    """

    def __init__(self, slots: int, received: Sequence[int], grace_seconds: float = GRACE_SECONDS) -> None:
        self._slots = slots
        self._received = received
        self._grace_seconds = grace_seconds
        self._running: list[tuple[Job, subprocess.Popen[bytes]]] = []

    def run(
        self,
        jobs: Iterable[Job],
        ended: Callable[[Job, int], None],
        tick: Callable[[Sequence[Job]], None] = lambda running: None,
    ) -> bool:
        """Runs all of them to their end, unless a signal comes.

        Args:
            jobs: taken one after the other when there are slots.
            ended: hears of each job that has ended, with its exit code, below zero if a signal has ended it.
            tick: hears of the running jobs now and then.

        Returns:
            Whether all were run.
        """
        waiting = iter(jobs)
        upcoming = next(waiting, None)
        try:
            while (upcoming is not None or self._running) and not self._received:
                while upcoming is not None and self._has_room(upcoming) and not self._received:
                    self._running.append((upcoming, _start(upcoming)))
                    upcoming = next(waiting, None)
                self._reap(ended)
                tick([job for job, _ in self._running])
                time.sleep(POLL_SECONDS)
            return not self._received
        finally:
            self._end_all(ended)

    def _has_room(self, job: Job) -> bool:
        taken = sum(min(other.slots, self._slots) for other, _ in self._running)
        return taken + min(job.slots, self._slots) <= self._slots

    def _reap(self, ended: Callable[[Job, int], None]) -> None:
        for job, process in list(self._running):
            if process.poll() is not None:
                self._running.remove((job, process))
                ended(job, process.returncode)

    def _end_all(self, ended: Callable[[Job, int], None]) -> None:
        for _, process in self._running:
            process.terminate()
        deadline = time.monotonic() + self._grace_seconds
        while self._running and time.monotonic() < deadline and len(self._received) < 2:
            self._reap(ended)
            time.sleep(POLL_SECONDS)
        for _, process in self._running:
            # Its group: what it has started may not have heard of the signal.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._reap(ended)


def _start(job: Job) -> "subprocess.Popen[bytes]":
    parent = os.getpid()

    def prepare() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    job.output.parent.mkdir(parents=True, exist_ok=True)
    with open(job.output, "ab") as output:
        # In a session of its own, Ctrl-C does not reach it: it is asked to end by the pool.
        return subprocess.Popen(
            job.command,
            env=dict(job.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,
        )
