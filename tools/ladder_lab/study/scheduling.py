"""Runs jobs in order in a number of slots, and shows how much of a grid of trials is done."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ladder_lab.study.schema import Trial
from megatron_ladder.processes import Child, end_children, start_child
from megatron_ladder.progress import ProgressBar

POLL_SECONDS = 0.2
GRACE_SECONDS = 120.0
"""Time that a stopped job has to save before it is killed."""
UPDATE_SECONDS = 2.0


@dataclass(frozen=True)
class Job:
    """A command to run, whose output is appended to a file."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    output: Path
    slots: int


def run_jobs(
    jobs: Iterable[Job],
    slots: int,
    received: Sequence[int],
    on_end: Callable[[Job, int], None],
    on_poll: Callable[[Sequence[Job]], None] = lambda running: None,
    grace_seconds: float = GRACE_SECONDS,
) -> bool:
    """Run all jobs to their end, unless a signal arrives, and return whether all ran.

    A job that needs more slots than are free waits, and so do the jobs after it. The first of the `received` signals is
    forwarded to the jobs as SIGTERM, and the second one kills them. `on_end` receives each job that ended and its exit
    code, and `on_poll` the running jobs.
    """
    running: list[tuple[Job, Child]] = []

    def reap() -> None:
        for job, child in list(running):
            if child.poll() is not None:
                running.remove((job, child))
                on_end(job, child.returncode)

    def has_room(job: Job) -> bool:
        return sum(min(one.slots, slots) for one in [job, *(other for other, _ in running)]) <= slots

    waiting = iter(jobs)
    upcoming = next(waiting, None)
    try:
        while (upcoming is not None or running) and not received:
            while upcoming is not None and has_room(upcoming) and not received:
                running.append((upcoming, _start(upcoming)))
                upcoming = next(waiting, None)
            reap()
            on_poll([job for job, _ in running])
            time.sleep(POLL_SECONDS)
        return not received
    finally:
        children = [child for _, child in running]
        end_children(children, grace_seconds, kill_groups=True, is_impatient=lambda: len(received) > 1)
        reap()


def _start(job: Job) -> Child:
    job.output.parent.mkdir(parents=True, exist_ok=True)
    # In a new session, so that Ctrl-C does not reach the job: `run_jobs` stops it.
    with open(job.output, "ab") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        return start_child(job.command, env=dict(job.environment), start_new_session=True, **streams)


class GridProgress:
    """Progress of a study in steps of this start; `position` reads the iteration and the loss of a trial."""

    def __init__(self, position: Callable[[Trial], tuple[int, float | None]], stream: TextIO | None = None) -> None:
        self.expected: Sequence[Trial] = ()
        self.done: set[str] = set()
        self._position, self._stream = position, stream or sys.stdout
        self._bar: ProgressBar | None = None
        self._steps_before: dict[str, int] = {}
        self._ended_steps = self._shown_steps = 0
        self._next_update = 0.0

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def start(self, trial: Trial) -> None:
        """Record how far a trial is before it starts or resumes."""
        self._steps_before[trial.name], _ = self._position(trial)

    def end(self, trial: Trial, text: str, is_done: bool = True) -> None:
        """Record and print that a trial has ended."""
        self._ended_steps += self._position(trial)[0] - self._steps_before.pop(trial.name, 0)
        if is_done:
            self.done.add(trial.name)
        self.say(f"[{len(self.done)}/{len(self.expected)}] {trial.name}: {text}")

    def update(self, running: Sequence[Trial]) -> None:
        """Show the progress of the grid and of each running trial, if it is due."""
        if time.monotonic() < self._next_update:
            return
        self._next_update = time.monotonic() + UPDATE_SECONDS
        steps = self._ended_steps
        left = sum(trial.iterations for trial in self.expected if trial.name not in self.done)
        notes = {}
        for trial in running:
            iteration, loss = self._position(trial)
            steps += iteration - self._steps_before.get(trial.name, 0)
            left -= iteration
            shown_loss = "" if loss is None else f" (loss {loss:.3f})"
            notes[f"{trial.kind} {trial.wiring} seed {trial.seed}"] = f"{iteration}/{trial.iterations}{shown_loss}"
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
