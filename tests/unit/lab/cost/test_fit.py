"""The fit against parameters that are known, and against what it was told to believe."""

import math
import random

import pytest

from megatron_ladder.lab.cost.fit import Parameter, fit_parameters, median_and_quantile

BELIEVED = (
    Parameter("latency", 5.0, 1.0, "us"),
    Parameter("rate", 100.0, 1.0, "GB/s"),
    Parameter("shift", 0.0, 10.0, "us", positive=False),
    Parameter("unseen", 7.0, 0.5, "nothing depends on it"),
)


def curve(values, x: float) -> float:
    return values["latency"] * math.log1p(x) + 1000 * x / values["rate"] + values["shift"]


def test_parameters_are_found_again_and_the_unseen_stay() -> None:
    true = {"latency": 9.0, "rate": 40.0, "shift": -3.0}
    points = [(x, curve(true, x)) for x in (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)]
    found = fit_parameters(BELIEVED, lambda values: [(curve(values, x) - y) / 0.01 for x, y in points])
    assert found == pytest.approx({**true, "unseen": 7.0}, rel=2e-3)


def test_an_outlier_moves_it_little() -> None:
    dice = random.Random(0)
    only = (Parameter("level", 1.0, 1.0, "of all"),)
    points = [2.0 * math.exp(dice.gauss(0, 0.01)) for _ in range(9)] + [6.0]
    found = fit_parameters(only, lambda values: [math.log(values["level"] / point) / 0.01 for point in points])
    assert found["level"] == pytest.approx(2.0, rel=0.01), "a mean of logarithms would be 2.23"


def test_belief_weighs_as_one_measurement() -> None:
    only = (Parameter("level", 1.0, 0.1, "of all", positive=False),)
    found = fit_parameters(only, lambda values: [(values["level"] - 1.1) / 0.1])
    assert found["level"] == pytest.approx(1.05)


def test_median_and_quantile() -> None:
    assert median_and_quantile([1, 2, 3, 4, 5], 0.75) == (3.0, 4.0)
