"""What a user sees of a study: a line for each trial that has ended, and one that says how far the grid is."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TextIO

from megatron_ladder.lab.study.trial import Trial

TERMINAL_SECONDS, PLAIN_SECONDS = 2.0, 30.0
"""Between two statuses: rewritten on a terminal, a line of its own elsewhere."""


@dataclass(frozen=True)
class Position:
    """How far a running trial is."""

    iteration: int
    loss: float | None
    tokens_per_second: float | None


@dataclass
class GridProgress:
    """Counts work in tokens, weighed with what a token of its model costs and with the slots that it takes."""

    cost: Callable[[Trial], float]
    """Work of a whole trial."""
    position: Callable[[Trial], Position]
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
        """Work of trials that ended since then."""
        self._found: dict[str, float] = {}
        """Name -> share that was done before this start."""
        self._status_width = 0

    def say(self, text: str) -> None:
        """A line of its own, above the status."""
        self._clear()
        print(text, file=self.stream, flush=True)

    def starts(self, trial: Trial) -> None:
        """Notes how far a trial is before it goes on."""
        self._found[trial.name] = self._share(trial)

    def ends(self, trial: Trial, text: str, is_done: bool = True) -> None:
        """A trial has ended in this start."""
        self._worked += self.cost(trial) * (self._share(trial) - self._found.get(trial.name, 0.0))
        if is_done:
            self.done.add(trial.name)
        self.say(f"[{len(self.done)}/{len(self.expected)}] {trial.name}: {text}")

    def tick(self, running: Sequence[Trial]) -> None:
        """Shows the status if it is time."""
        now, is_terminal = self.clock(), self.stream.isatty()
        if now - self._shown < (TERMINAL_SECONDS if is_terminal else PLAIN_SECONDS):
            return
        self._shown = now
        text = self.status(running)
        if not is_terminal:
            print(text, file=self.stream, flush=True)
            return
        self._clear()
        print(text, end="", file=self.stream, flush=True)
        self._status_width = len(text)

    def status(self, running: Sequence[Trial]) -> str:
        """How far the grid is, and each running trial, in one line."""
        elapsed = self.clock() - self._began
        partial = {trial.name: self.cost(trial) * self._share(trial) for trial in running}
        begun = sum(self.cost(trial) * self._found.get(trial.name, 0.0) for trial in running)
        worked = self._worked + sum(partial.values()) - begun
        left = sum(self.cost(trial) for trial in self.expected if trial.name not in self.done) - sum(partial.values())
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
