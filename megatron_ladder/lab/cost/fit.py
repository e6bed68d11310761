"""Fits the parameters of a physical model to measurements that are few and not alike.

Every parameter has a value that is believed before anything is measured, and a spread: how far from it one expects to
end. What the measurements say nothing of stays where it is, so that a fit on half of a table does not bend to the
other half's absence. Least squares by Levenberg-Marquardt; a residual counts in full up to `OUTLIER` of its own
spread and with its magnitude alone beyond (Huber), since the same setting measured twice now and then differs a lot.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

OUTLIER = 2.0
"""Residuals beyond so many spreads count as outliers."""
MOST_STEPS = 40
SMALLEST_GAIN = 1e-5
"""Relative gain below which a step is the last one."""
DIFFERENCE = 1e-4
"""In spreads, for the derivatives."""


@dataclass(frozen=True)
class Parameter:
    """What is believed of one parameter before measurements."""

    name: str
    value: float
    spread: float
    """Standard deviation; of the logarithm if the parameter is positive by nature, else in the parameter's unit."""
    meaning: str
    """What it is, with its unit."""
    positive: bool = True
    """Whether it is varied by factors, which keeps its sign."""

    def at(self, position: float) -> float:
        """The value so many spreads away from what is believed."""
        if self.positive:
            return self.value * math.exp(self.spread * position)
        return self.value + self.spread * position


def fit_parameters(
    parameters: Sequence[Parameter], residuals: Callable[[Mapping[str, float]], Sequence[float]]
) -> dict[str, float]:
    """The most likely values.

    Args:
        residuals: values by name -> differences to the measurements, each divided by its expected spread.
    """

    def values(position: Vector) -> dict[str, float]:
        return {p.name: p.at(x) for p, x in zip(parameters, position.tolist(), strict=True)}

    def errors(position: Vector) -> Vector:
        return np.concatenate([_huber(np.array(residuals(values(position)), dtype=np.float64)), position])

    position = np.zeros(len(parameters))
    error = errors(position)
    damping = 1e-2
    for _ in range(MOST_STEPS):
        columns = [(errors(position + DIFFERENCE * unit) - error) / DIFFERENCE for unit in np.eye(len(parameters))]
        jacobian = np.stack(columns, axis=1)
        curvature, slope = jacobian.T @ jacobian, jacobian.T @ error
        gain = 0.0
        while damping < 1e8:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -slope)
            tried = errors(position + step)
            gain = float(error @ error - tried @ tried)
            if gain > 0:
                position, error = position + step, tried
                damping = max(damping / 5, 1e-8)
                break
            damping *= 4
        if gain <= SMALLEST_GAIN * float(error @ error):
            break
    return values(position)


def _huber(residuals: Vector) -> Vector:
    """Residuals whose squares grow like their magnitude beyond `OUTLIER`."""
    size = np.abs(residuals)
    outside = np.sqrt(np.maximum(2 * OUTLIER * size - OUTLIER**2, 0.0))
    return np.where(size <= OUTLIER, residuals, np.sign(residuals) * outside)


def median_and_quantile(values: Sequence[float], quantile: float) -> tuple[float, float]:
    """The median, and the value that this share of all does not exceed."""
    return float(np.median(values)), float(np.quantile(values, quantile))
