"""Several ways to do the same thing, timed in alternation: A B C D A B C D.

A machine drifts: its clock, its caches, its other users. Runs of the same round see nearly the same machine, so ways
are compared within each round, and the result is the median of these *paired* ratios, not a ratio of medians. The
spread of a ratio is its interquartile range: a single disturbed round affects neither the spread nor the median.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from megatron_ladder.progress import ProgressBar

NOISE_LIMIT = 0.10
"""Spread over median above which a ratio is not judged. At 7 rounds the median is then good to about 3.5 %."""


class RatioVerdict(Enum):
    """How far a ratio can be trusted."""

    SOUND = "sound"
    TOO_NOISY = "too noisy to judge"
    ABOVE_BOUND = "above its bound: a measuring error"
    """It exceeds the possible maximum by more than its spread."""
    REHEARSED = "rehearsed on a CPU"


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of a paired ratio over all rounds."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Interquartile range."""
        return self.high - self.low

    def verdict(self, bound: float | None = None) -> RatioVerdict:
        """Judge the ratio. `bound` is the possible maximum, exceeded only by measuring errors; None if unknown."""
        if self.spread > NOISE_LIMIT * self.median:
            return RatioVerdict.TOO_NOISY
        if bound is not None and self.median > bound + self.spread:
            return RatioVerdict.ABOVE_BOUND
        return RatioVerdict.SOUND


@dataclass(frozen=True)
class PairedTimes:
    """Seconds of each way in each round; all ways have the same rounds."""

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, way: str) -> float:
        """Return the median of a way's seconds."""
        return statistics.median(self.seconds[way])

    def ratio(self, slow: str, fast: str) -> Ratio:
        """Return the time of `slow` over that of `fast`, round by round: the speed-up of `fast` over `slow`."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        low, median, high = statistics.quantiles((a / b for a, b in pairs), n=4, method="inclusive")
        return Ratio(median, low, high)


def measure(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up_rounds: int = 1,
    before_each: Callable[[str], object] = lambda name: None,
    label: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PairedTimes:
    """Run every way once in each round, always in the same order, and time it.

    Args:
        ways: name -> function to time.
        rounds: rounds that count, after the warm-up rounds.
        before_each: receives a way's name and prepares it, untimed; if it has several ranks, with a barrier.
        label: of a progress bar on stderr; None shows none.
        clock: returns seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    total = (warm_up_rounds + rounds) * len(ways)
    with contextlib.nullcontext() if label is None else ProgressBar(label, total, unit="run") as bar:
        for number in range(-warm_up_rounds, rounds):
            for name, run in ways.items():
                before_each(name)
                began = clock()
                run()
                taken = clock() - began
                if number >= 0:
                    seconds[name].append(taken)
                if bar is not None:
                    bar.advance(1)
    return PairedTimes({name: tuple(times) for name, times in seconds.items()})
