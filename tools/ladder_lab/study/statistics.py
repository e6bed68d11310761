"""Statistics of a few paired runs: paired intervals by Student's t, and Holm's correction.

Two runs with the same seed form a pair: they share initial weights and order of samples, so their difference does not
contain the effect of the seed. All losses are in nats per token.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from enum import Enum

CONFIDENCE = 0.95


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
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


class Paired:
    """Mean difference of pairs with its interval and two-sided p-value (mean 0); NaN where more pairs are needed."""

    def __init__(self, differences: Sequence[float]) -> None:
        # Imported here because scipy comes with the extra [lab] and takes time to import.
        from scipy import stats

        self.differences = tuple(differences)
        self.pairs = len(differences)
        self.mean = mean(differences)
        self.standard_error = deviation(differences) / math.sqrt(max(self.pairs, 1))
        self.half_width = self.p = math.nan
        if math.isfinite(self.standard_error):
            freedom = self.pairs - 1
            self.half_width = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * self.standard_error
            self.p = 1.0 if self.mean == 0 else 0.0
            if self.standard_error > 0:
                self.p = float(2 * stats.t.sf(abs(self.mean / self.standard_error), freedom))
        self.interval = (self.mean - self.half_width, self.mean + self.half_width)
        if not all(map(math.isfinite, differences)):
            self.verdict = LossVerdict.DIVERGED
        elif self.pairs < 2:
            self.verdict = LossVerdict.TOO_FEW
        elif self.interval[0] <= 0 <= self.interval[1]:
            self.verdict = LossVerdict.NO_DIFFERENCE
        else:
            self.verdict = LossVerdict.BETTER if self.mean < 0 else LossVerdict.WORSE


def paired(losses: Mapping[int, float], baseline: Mapping[int, float]) -> Paired:
    """Subtract the baseline's loss of the same seed, for every seed that both have."""
    return Paired(tuple(losses[seed] - baseline[seed] for seed in sorted(losses.keys() & baseline.keys())))


def holm(probabilities: Mapping[str, float]) -> dict[str, float]:
    """Adjust p-values for several comparisons (Holm 1979). NaN values are not counted and stay NaN."""
    ordered = sorted((p, name) for name, p in probabilities.items() if not math.isnan(p))
    adjusted, largest = dict(probabilities), 0.0
    for number, (p, name) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - number) * p))
        adjusted[name] = largest
    return adjusted


def first_reaching(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return where a curve of (position, loss) first reaches a loss, interpolating linearly; None if it never does."""
    before = math.nan, math.nan
    for position, value in curve:
        if value <= loss:
            if not math.isfinite(before[1]):
                return position
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (position - before[0])
        before = (position, value)
    return None
