"""Runs jobs concurrently in a number of slots, and shows how much of a grid of trials is done.

Jobs start in order: a job that needs more slots than are free waits for them, and so do the jobs after it. No job
outlives the process that started it.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from megatron_ladder.lab.study.trial import Trial
from megatron_ladder.processes import Child, end_children, start_child

POLL_SECONDS = 0.2
GRACE_SECONDS = 120.0
"""Time that a stopped job has to save before it is killed."""
TERMINAL_SECONDS, PLAIN_SECONDS = 2.0, 30.0
"""Time between two status lines: overwritten on a terminal, appended elsewhere."""


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
    tokens_per_second: float | None


@dataclass
class GridProgress:
    """Progress of all trials, weighted by their cost.

    It is not a `ProgressBar`, because its total changes while learning rates and step times are being found, and its
    line shows every running trial.
    """

    cost: Callable[[Trial], float]
    """Cost of a whole trial, in any unit."""
    position: Callable[[Trial], TrialPosition]
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    clock: Callable[[], float] = time.monotonic
    expected: Sequence[Trial] = ()
    """All trials, as far as they are known."""
    done: set[str] = field(default_factory=set)
    """Names of trials."""

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._shown = -PLAIN_SECONDS
        self._worked = 0.0
        """Cost of the work since then on trials that ended."""
        self._found: dict[str, float] = {}
        """Name -> share that was done before this start."""
        self._status_width = 0

    def say(self, text: str) -> None:
        """Print a line above the status."""
        self._clear()
        print(text, file=self.stream, flush=True)

    def start(self, trial: Trial) -> None:
        """Record how far a trial is before it starts or resumes."""
        self._found[trial.name] = self._share(trial)

    def end(self, trial: Trial, text: str, is_done: bool = True) -> None:
        """Record and print that a trial has ended."""
        self._worked += self.cost(trial) * (self._share(trial) - self._found.get(trial.name, 0.0))
        if is_done:
            self.done.add(trial.name)
        self.say(f"[{len(self.done)}/{len(self.expected)}] {trial.name}: {text}")

    def update(self, running: Sequence[Trial]) -> None:
        """Print the status if it is due."""
        now, is_terminal = self.clock(), self.stream.isatty()
        if now - self._shown < (TERMINAL_SECONDS if is_terminal else PLAIN_SECONDS):
            return
        self._shown = now
        text = self.status(running)
        self._clear()
        print(text, end="" if is_terminal else "\n", file=self.stream, flush=True)
        self._status_width = len(text) if is_terminal else 0

    def status(self, running: Sequence[Trial]) -> str:
        """Return one line with the progress of the grid and of each running trial."""
        elapsed = self.clock() - self._began
        partial = sum(self.cost(trial) * self._share(trial) for trial in running)
        begun = sum(self.cost(trial) * self._found.get(trial.name, 0.0) for trial in running)
        worked = self._worked + partial - begun
        left = sum(self.cost(trial) for trial in self.expected if trial.name not in self.done) - partial
        words = [f"{len(self.done)}/{len(self.expected)} trials", *(self._describe(trial) for trial in running)]
        words.append(f"{_duration(elapsed)} so far")
        if worked > 0:
            words.append(f"{_duration(max(left, 0.0) * elapsed / worked)} left")
        return " | ".join(words)

    def _describe(self, trial: Trial) -> str:
        at = self.position(trial)
        words = f"{trial.kind} {trial.wiring} seed {trial.seed} lr {trial.learning_rate:g}: "
        words += f"{at.iteration}/{trial.iterations}"
        if at.loss is not None and at.tokens_per_second is not None:
            words += f", loss {at.loss:.3f}, {at.tokens_per_second:,.0f} tokens/s"
        return words

    def _share(self, trial: Trial) -> float:
        return min(1.0, self.position(trial).iteration / max(1, trial.iterations))

    def _clear(self) -> None:
        if self._status_width:
            print("\r" + " " * self._status_width + "\r", end="", file=self.stream)
            self._status_width = 0


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
