"""Runs jobs concurrently in a number of slots, and shows how much of a grid of trials is done.

Jobs start in order: a job that needs more slots than are free waits for them, and so do the jobs after it. No job
outlives the process that started it.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megatron_ladder.lab.study.trial import Trial
from megatron_ladder.processes import Child, end_children, start_child
from megatron_ladder.progress import ProgressBar

POLL_SECONDS = 0.2
GRACE_SECONDS = 120.0
"""Time that a stopped job has to save before it is killed."""
UPDATE_SECONDS = 2.0
"""Time between two reads of the running trials' progress."""


@dataclass(frozen=True)
class Job:
    """A command to run."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    output: Path
    """File to which its output is appended."""
    slots: int


class Pool:
    """Slots for jobs.

    Args:
        slots: number of slots; a job that needs more uses all of them.
        received: signals that request the end, as they arrive. The first one is forwarded to the jobs as SIGTERM, and
            the second one kills them at once.
    """

    def __init__(self, slots: int, received: Sequence[int], grace_seconds: float = GRACE_SECONDS) -> None:
        self._slots = slots
        self._received = received
        self._grace_seconds = grace_seconds
        self._running: list[tuple[Job, Child]] = []

    def run(
        self,
        jobs: Iterable[Job],
        on_end: Callable[[Job, int], None],
        on_poll: Callable[[Sequence[Job]], None] = lambda running: None,
    ) -> bool:
        """Run all jobs to their end, unless a signal arrives.

        Args:
            jobs: taken one after the other when slots are free.
            on_end: called for each job that ended, with its exit code; negative if a signal ended it.
            on_poll: called regularly with the running jobs.

        Returns:
            Whether all jobs ran.
        """
        waiting = iter(jobs)
        upcoming = next(waiting, None)
        try:
            while (upcoming is not None or self._running) and not self._received:
                while upcoming is not None and self._has_room(upcoming) and not self._received:
                    self._running.append((upcoming, _start(upcoming)))
                    upcoming = next(waiting, None)
                self._reap(on_end)
                on_poll([job for job, _ in self._running])
                time.sleep(POLL_SECONDS)
            return not self._received
        finally:
            children = [child for _, child in self._running]
            end_children(
                children, self._grace_seconds, kill_groups=True, is_impatient=lambda: len(self._received) > 1
            )
            self._reap(on_end)

    def _has_room(self, job: Job) -> bool:
        used = sum(min(other.slots, self._slots) for other, _ in self._running)
        return used + min(job.slots, self._slots) <= self._slots

    def _reap(self, on_end: Callable[[Job, int], None]) -> None:
        for job, child in list(self._running):
            if child.poll() is not None:
                self._running.remove((job, child))
                on_end(job, child.returncode)


def _start(job: Job) -> Child:
    job.output.parent.mkdir(parents=True, exist_ok=True)
    with open(job.output, "ab") as output:
        # In a new session, so that Ctrl-C does not reach the job: the pool stops it.
        return start_child(
            job.command,
            env=dict(job.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@dataclass(frozen=True)
class TrialPosition:
    """Progress of a running trial."""

    iteration: int
    loss: float | None


class GridProgress:
    """Progress of a study in training steps of this start, and one line per trial that ended.

    Attributes:
        expected: all trials, as far as they are known.
        done: names of finished trials.
    """

    def __init__(self, position: Callable[[Trial], TrialPosition], stream: TextIO | None = None) -> None:
        """`position` reads the progress of a trial; the default stream is stdout."""
        self.expected: Sequence[Trial] = ()
        self.done: set[str] = set()
        self._position = position
        self._stream = stream or sys.stdout
        self._bar: ProgressBar | None = None
        self._found: dict[str, int] = {}
        """Name -> steps before this start."""
        self._ended_steps = 0
        """Steps in this start of trials that ended."""
        self._shown_steps = 0
        self._next_update = 0.0

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def start(self, trial: Trial) -> None:
        """Record how far a trial is before it starts or resumes."""
        self._found[trial.name] = self._position(trial).iteration

    def end(self, trial: Trial, text: str, is_done: bool = True) -> None:
        """Record and print that a trial has ended."""
        self._ended_steps += self._position(trial).iteration - self._found.pop(trial.name, 0)
        if is_done:
            self.done.add(trial.name)
        self.say(f"[{len(self.done)}/{len(self.expected)}] {trial.name}: {text}")

    def update(self, running: Sequence[Trial]) -> None:
        """Show the progress of the grid and of each running trial, if it is due."""
        if time.monotonic() < self._next_update:
            return
        self._next_update = time.monotonic() + UPDATE_SECONDS
        at = {trial.name: self._position(trial) for trial in running}
        steps = self._ended_steps + sum(at[name].iteration - self._found.get(name, 0) for name in at)
        left = sum(trial.iterations for trial in self.expected if trial.name not in self.done)
        left -= sum(position.iteration for position in at.values())
        notes = {f"{one.kind} {one.wiring} seed {one.seed}": _describe(one, at[one.name]) for one in running}
        if self._bar is None:
            self._bar = ProgressBar("study", None, unit="step", stream=self._stream)
        self._bar.set_total(steps + max(0, left))
        self._bar.advance(steps - self._shown_steps, trials=f"{len(self.done)}/{len(self.expected)}", **notes)
        self._shown_steps = steps

    def close(self) -> None:
        """Show the final state."""
        if self._bar is not None:
            self._next_update = 0.0
            self.update([])
            self._bar.close()


def _describe(trial: Trial, at: TrialPosition) -> str:
    loss = "" if at.loss is None else f" (loss {at.loss:.3f})"
    return f"{at.iteration}/{trial.iterations}{loss}"
