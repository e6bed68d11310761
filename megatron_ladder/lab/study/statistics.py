"""What a few paired runs support: Student's t without a library, paired intervals, and Holm's correction.

Two runs are a pair when they share a seed: initial weights and order of samples. Their difference has lost what the
seed gave to both, so it is judged, and not the difference of two means. All losses are in nats a token.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

CONFIDENCE = 0.95
"""Of every interval; 1 - CONFIDENCE is the level that an adjusted p is held against."""
BISECTIONS = 200
"""More than the bits of a double: the interval ends at neighbouring numbers."""


class Verdict(Enum):
    """What a paired difference of losses supports."""

    BETTER = "better"
    WORSE = "worse"
    NOT_TOLD_APART = "not told apart"
    TOO_FEW = "no verdict: fewer than two pairs"
    DIVERGED = "no verdict: a run diverged"


def within_probability(t: float, degrees: int) -> float:
    """P(|T| < t) of Student's t: the finite sums for whole degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.

    Raises:
        ValueError: `degrees` is below 1.
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom: expected 1 or more")
    angle = math.atan2(abs(t), math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| < t) = confidence: how many standard errors an interval reaches to either side.

    Raises:
        ValueError: `confidence` is not between 0 and 1, or `degrees` is below 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence}: expected a number between 0 and 1")
    low, high = 0.0, 1.0
    while within_probability(high, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if within_probability(middle, degrees) < confidence else (low, middle)
    return high


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of none, and not finite if a value is not."""
    return sum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1); NaN of fewer than two values or where one is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


@dataclass(frozen=True)
class Paired:
    """Differences of paired runs, one for each seed that both have."""

    differences: tuple[float, ...]

    @property
    def pairs(self) -> int:
        """How many."""
        return len(self.differences)

    @property
    def mean(self) -> float:
        """NaN without a pair."""
        return mean(self.differences)

    @property
    def standard_error(self) -> float:
        """Of the mean; NaN for fewer than two pairs."""
        return deviation(self.differences) / math.sqrt(max(self.pairs, 1))

    @property
    def half_width(self) -> float:
        """How far the interval reaches to either side of the mean; NaN for fewer than two pairs."""
        return t_quantile(self.pairs - 1) * self.standard_error if self.pairs > 1 else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The mean's, at `CONFIDENCE`."""
        return self.mean - self.half_width, self.mean + self.half_width

    @property
    def p(self) -> float:
        """Two-sided p of "the mean is 0"; NaN where there is no interval."""
        if not math.isfinite(self.half_width):
            return math.nan
        if self.standard_error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return 1 - within_probability(self.mean / self.standard_error, self.pairs - 1)

    @property
    def verdict(self) -> Verdict:
        """By whether the interval leaves out 0, this comparison taken alone."""
        if not all(map(math.isfinite, self.differences)):
            return Verdict.DIVERGED
        if self.pairs < 2:
            return Verdict.TOO_FEW
        low, high = self.interval
        if low <= 0 <= high:
            return Verdict.NOT_TOLD_APART
        return Verdict.BETTER if high < 0 else Verdict.WORSE


def paired(losses: Mapping[int, float], baseline: Mapping[int, float]) -> Paired:
    """Loss less the baseline's of the same seed, for every seed that both have."""
    return Paired(tuple(losses[seed] - baseline[seed] for seed in sorted(losses.keys() & baseline.keys())))


def holm(probabilities: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted for being one of several (Holm 1979): the chance that any of them errs is held together.

    Those that are NaN are no comparison: they count for nothing and stay NaN.
    """
    ordered = sorted((p, name) for name, p in probabilities.items() if not math.isnan(p))
    adjusted = dict(probabilities)
    largest = 0.0
    for number, (p, name) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - number) * p))
        adjusted[name] = largest
    return adjusted


def first_reaching(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Where a curve (position, loss) first comes down to a loss, linear between its points; None if it never does."""
    before: tuple[float, float] | None = None
    for position, value in curve:
        if value <= loss:
            if before is None or not math.isfinite(before[1]):
                return position
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (position - before[0])
        before = (position, value)
    return None


def interpolated(curve: Sequence[tuple[float, float]], position: float) -> float | None:
    """A curve's loss at a position, linear between its points; None outside of them."""
    for (left, low), (right, high) in zip(curve, curve[1:], strict=False):
        if left <= position <= right:
            return low + (high - low) * (position - left) / (right - left)
    return None
