"""Statistics of a few paired runs: paired intervals by Student's t, and Holm's correction.

Two runs with the same seed form a pair: they share initial weights and order of samples. Their difference does not
contain the effect of the seed, so differences are judged, and not the difference of two means. All losses are in nats
per token.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

CONFIDENCE = 0.95
"""Of every interval; adjusted p-values are compared with 1 - CONFIDENCE."""


class LossVerdict(Enum):
    """The conclusion that a paired difference of losses supports."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference found"
    TOO_FEW = "no verdict: fewer than two pairs"
    DIVERGED = "no verdict: a run diverged"


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; NaN without values, and not finite if a value is not."""
    return sum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n - 1); NaN for fewer than two values or if one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


@dataclass(frozen=True)
class Paired:
    """Differences of paired runs, one for each seed that both have. A statistic without enough pairs is NaN."""

    differences: tuple[float, ...]

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return len(self.differences)

    @property
    def mean(self) -> float:
        """Mean difference."""
        return mean(self.differences)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean."""
        return deviation(self.differences) / math.sqrt(max(self.pairs, 1))

    @property
    def half_width(self) -> float:
        """Half the width of the interval of the mean, at `CONFIDENCE`."""
        # Imported here because scipy comes with the extra [lab] and takes time to import.
        from scipy import stats

        quantile = stats.t.ppf((1 + CONFIDENCE) / 2, self.pairs - 1) if self.pairs > 1 else math.nan
        return float(quantile) * self.standard_error

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of the mean."""
        return self.mean - self.half_width, self.mean + self.half_width

    @property
    def p(self) -> float:
        """Two-sided p-value of "the mean is 0"."""
        if not math.isfinite(self.standard_error):
            return math.nan
        if self.standard_error == 0:
            return 1.0 if self.mean == 0 else 0.0
        from scipy import stats

        return float(2 * stats.t.sf(abs(self.mean / self.standard_error), self.pairs - 1))

    @property
    def verdict(self) -> LossVerdict:
        """Whether the interval excludes 0, for this comparison alone."""
        if not all(map(math.isfinite, self.differences)):
            return LossVerdict.DIVERGED
        if self.pairs < 2:
            return LossVerdict.TOO_FEW
        low, high = self.interval
        if low <= 0 <= high:
            return LossVerdict.NO_DIFFERENCE
        return LossVerdict.BETTER if high < 0 else LossVerdict.WORSE


def paired(losses: Mapping[int, float], baseline: Mapping[int, float]) -> Paired:
    """Subtract the baseline's loss of the same seed, for every seed that both have."""
    return Paired(tuple(losses[seed] - baseline[seed] for seed in sorted(losses.keys() & baseline.keys())))


def holm(probabilities: Mapping[str, float]) -> dict[str, float]:
    """Adjust p-values for several comparisons (Holm 1979), which bounds the chance that any of them errs.

    NaN values are no comparisons: they are not counted and stay NaN.
    """
    ordered = sorted((p, name) for name, p in probabilities.items() if not math.isnan(p))
    adjusted = dict(probabilities)
    largest = 0.0
    for number, (p, name) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - number) * p))
        adjusted[name] = largest
    return adjusted


def first_reaching(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return where a curve of (position, loss) first reaches a loss, interpolating linearly; None if it never does."""
    before: tuple[float, float] | None = None
    for position, value in curve:
        if value <= loss:
            if before is None or not math.isfinite(before[1]):
                return position
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (position - before[0])
        before = (position, value)
    return None
