"""Several ways to do one thing, timed side by side: A B C D A B C D.

A machine drifts: its clock, its caches, its neighbours. What runs in the same round sees much the same machine, so
ways are compared within each round, and the median is taken of these *paired* ratios, not a ratio of medians. The
spread of a ratio is the distance of its quartiles: a single disturbed round moves neither it nor the median.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

FEWEST_ROUNDS = 4
"""Below this, quartiles say nothing."""
NOISE_LIMIT = 0.10
"""Spread over median above which a ratio is not judged. At 7 rounds the median is then good to about 3.5 %."""


class Verdict(Enum):
    """What a ratio is worth."""

    SOUND = "sound"
    """It may be reported."""
    TOO_NOISY = "too noisy to judge"
    """Its rounds differ too much from one another."""
    ABOVE_BOUND = "above its bound: a measuring error"
    """It exceeds what is possible by more than its spread."""


@dataclass(frozen=True)
class Ratio:
    """A paired ratio over all rounds."""

    median: float
    """Of the rounds' ratios."""
    low: float
    """First quartile."""
    high: float
    """Third quartile."""

    @property
    def spread(self) -> float:
        """Distance of the quartiles."""
        return self.high - self.low

    def verdict(self, bound: float | None = None, noise_limit: float = NOISE_LIMIT) -> Verdict:
        """Whether the ratio can be believed.

        Args:
            bound: what it cannot exceed by more than its spread; None if nothing is known.
            noise_limit: largest spread, as a share of the median.
        """
        if self.spread > noise_limit * self.median:
            return Verdict.TOO_NOISY
        if bound is not None and self.median > bound + self.spread:
            return Verdict.ABOVE_BOUND
        return Verdict.SOUND


@dataclass(frozen=True)
class PairedTimes:
    """Seconds of each way in each round; all ways have the same rounds."""

    seconds: Mapping[str, tuple[float, ...]]
    """Way -> its time in round 0, 1, ..."""

    def __post_init__(self) -> None:
        """Raises ValueError if ways differ in their number of rounds, or there are fewer than four."""
        rounds = {name: len(times) for name, times in self.seconds.items()}
        if len(set(rounds.values())) > 1 or min(rounds.values(), default=0) < FEWEST_ROUNDS:
            raise ValueError(f"expected the same {FEWEST_ROUNDS} or more rounds of every way, found {rounds}")

    def median(self, way: str) -> float:
        """Median of a way's seconds."""
        return statistics.median(self.seconds[way])

    def ratio(self, slow: str, fast: str) -> Ratio:
        """How many times `slow` takes as long as `fast`, round by round: the speed-up of `fast` over `slow`."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        low, median, high = statistics.quantiles((a / b for a, b in pairs), n=4, method="inclusive")
        return Ratio(median, low, high)


def measure(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up_rounds: int = 1,
    before_each: Callable[[], object] = lambda: None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> PairedTimes:
    """Runs every way once in each round, always in the same order, and times it.

    Where several ranks take part, each makes this call alike, and `before_each` is a barrier of theirs.

    Args:
        ways: name -> what to time.
        rounds: that count; at least four.
        warm_up_rounds: that do not count, before them.
        before_each: runs before each way, outside of its time.
        progress: is told (ways run so far, ways to run in all, warm-up included) after each.
        clock: seconds.

    Raises:
        ValueError: there are too few rounds.
    """
    if rounds < FEWEST_ROUNDS:
        raise ValueError(f"{rounds} rounds: expected {FEWEST_ROUNDS} or more")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    done, total = 0, (warm_up_rounds + rounds) * len(ways)
    for number in range(-warm_up_rounds, rounds):
        for name, run in ways.items():
            before_each()
            began = clock()
            run()
            taken = clock() - began
            if number >= 0:
                seconds[name].append(taken)
            done += 1
            progress(done, total)
    return PairedTimes({name: tuple(times) for name, times in seconds.items()})
