"""Statistics of a study's report, and how its tables show them.

Two runs with the same seed form a pair: they share initial weights and order of samples, so their difference does not
contain the effect of the seed. All losses are in nats per token.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, stats

CONFIDENCE = 0.95
NOTHING = "–"
Curve = Sequence[tuple[float, float]]
"""Positions, ascending, and the validation loss at each."""


def at_chosen_rates(study: Mapping[str, Any], runs: pd.DataFrame, size: str) -> pd.DataFrame:
    """Return the runs of a size that have the learning rate which is chosen for their wiring."""
    of_size = runs[runs["size"] == size]
    return of_size[of_size.learning_rate == of_size.wiring.map(lambda wiring: study["chosen"].get(f"{size}/{wiring}"))]


def at_equal_tokens(study: Mapping[str, Any], runs: pd.DataFrame, size: str) -> pd.DataFrame:
    """Return the runs of a size that are compared at equal tokens."""
    chosen = at_chosen_rates(study, runs, size)
    return chosen[(chosen.kind == "tokens") & (chosen.iterations == study["sizes"][size]["iterations"])]


def losses_by_seed(runs: pd.DataFrame) -> dict[int, float]:
    """Map seeds to final losses."""
    return dict(zip(runs.seed, runs.loss, strict=True))


def paired(losses: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, float]:
    """Return mean, 95 % interval and p-value of the differences from the baseline's losses of the same seeds.

    They are NaN where fewer pairs exist than a value needs, or if a run diverged.
    """
    apart = np.array([losses[seed] - baseline[seed] for seed in sorted(losses.keys() & baseline.keys())])
    nothing = dict.fromkeys(("low", "high", "p"), math.nan)
    if not len(apart) or not np.isfinite(apart).all():
        return {"mean": math.nan, **nothing}
    if len(apart) < 2 or np.ptp(apart) == 0:
        return {"mean": float(apart.mean()), **nothing}
    test = stats.ttest_1samp(apart, 0.0)
    low, high = test.confidence_interval(CONFIDENCE)
    return {"mean": float(apart.mean()), "low": float(low), "high": float(high), "p": float(test.pvalue)}


def holm(probabilities: Sequence[float]) -> list[float]:
    """Adjust p-values for several comparisons (Holm 1979). NaN values are not counted and stay NaN."""
    known = pd.Series(probabilities, dtype=float).dropna().sort_values()
    factors = np.arange(len(known), 0, -1)
    adjusted = (known * factors).cummax().clip(upper=1.0)
    return [float(adjusted.get(index, math.nan)) for index in range(len(probabilities))]


def first_reaching(curve: Curve, loss: float) -> float | None:
    """Return where a curve first reaches a loss, interpolating linearly; None if it never does."""
    positions, losses = (np.array(values, dtype=float) for values in zip(*curve, strict=True))
    reached = np.flatnonzero(losses <= loss)
    if not len(reached):
        return None
    at = reached[0]
    if at == 0 or not math.isfinite(losses[at - 1]):
        return float(positions[at])
    return float(np.interp(loss, losses[[at, at - 1]], positions[[at, at - 1]]))


def trend(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return slope, 95 % interval and p-value of the line of least squares through points; NaN if they are too few."""
    nothing = dict.fromkeys(("slope", "intercept", "low", "high", "p"), math.nan)
    positions, values = np.array(points, dtype=float).reshape(-1, 2).T
    if len(points) < 3 or np.ptp(positions) == 0 or not np.isfinite(values).all():
        return nothing
    line = stats.linregress(positions, values)
    half = line.stderr * stats.t.ppf((1 + CONFIDENCE) / 2, len(points) - 2)
    interval = {"low": line.slope - half, "high": line.slope + half}
    return {"slope": line.slope, "intercept": line.intercept, **interval, "p": line.pvalue}


def power_law(points: Sequence[tuple[float, float]]) -> dict[str, tuple[float, float]] | None:
    """Fit loss = E + A (N / the least N)^-alpha by least squares; return each value with half its 95 % interval.

    None if the points do not determine it: fewer than four sizes, or an interval of E or alpha that contains 0.
    """
    sizes, losses = np.array(points, dtype=float).reshape(-1, 2).T
    if len(np.unique(sizes)) < 4 or not np.isfinite(losses).all():
        return None
    start = (0.5 * losses.min(), losses.max() - 0.5 * losses.min(), 0.3)
    try:
        values, covariance = optimize.curve_fit(
            lambda n, e, a, alpha: e + a * n**-alpha, sizes / sizes.min(), losses, start
        )
    except RuntimeError:
        # It did not converge.
        return None
    halves = np.sqrt(np.diag(covariance)) * stats.t.ppf((1 + CONFIDENCE) / 2, len(points) - 3)
    if not (halves[[0, 2]] < values[[0, 2]]).all():
        return None
    return {
        name: (float(value), float(half)) for name, value, half in zip(("E", "A", "alpha"), values, halves, strict=True)
    }


def number(value: float, form: str = ".4f") -> str:
    """Format a number with a minus sign; a dash for NaN."""
    return NOTHING if math.isnan(value) else f"{value:{form}}".replace("-", "−")


def mean_and_deviation(values: Sequence[float], form: str = ".4f") -> str:
    """Format `mean ± sample standard deviation`; the mean alone for a single value, a dash for none."""
    known = pd.Series(values, dtype=float)
    spread = "" if len(known) < 2 else f" ± {number(float(known.std()), form)}"
    return number(float(known.mean()), form) + spread


def with_interval(value: float, interval: Mapping[str, float]) -> str:
    """Format `value ± half the interval`; the value alone without an interval, a dash for none."""
    half = (interval["high"] - interval["low"]) / 2
    return number(value, "+.3f") + ("" if math.isnan(half) else f" ± {number(half, '.3f')}")


def verdict(interval: Mapping[str, float], adjusted_p: float, negative: str, positive: str, neither: str) -> str:
    """Return what an interval shows, bold if that holds among all comparisons of its table; a dash without one."""
    if math.isnan(interval["low"]):
        return NOTHING
    if interval["low"] <= 0 <= interval["high"]:
        return neither
    word = negative if interval["high"] < 0 else positive
    return f"**{word}**" if adjusted_p <= 1 - CONFIDENCE else word
