"""Student's t against printed tables, and paired intervals, Holm's correction and crossings against hand-made sums."""

import math

import pytest

from megatron_ladder.lab.study.statistics import (
    Paired,
    Verdict,
    deviation,
    first_reaching,
    holm,
    interpolated,
    mean,
    paired,
    t_quantile,
    within_probability,
)


@pytest.mark.parametrize(
    ("degrees", "at_95", "at_99"),
    [
        (1, 12.706, 63.657), (2, 4.303, 9.925), (3, 3.182, 5.841), (4, 2.776, 4.604), (5, 2.571, 4.032),
        (6, 2.447, 3.707), (9, 2.262, 3.250), (10, 2.228, 3.169), (29, 2.045, 2.756), (30, 2.042, 2.750),
        (120, 1.980, 2.617),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_printed_tables(degrees: int, at_95: float, at_99: float) -> None:
    assert round(t_quantile(degrees), 3) == at_95
    assert round(t_quantile(degrees, 0.99), 3) == at_99


def test_probabilities_have_their_closed_forms_and_tails() -> None:
    assert within_probability(2.0, 2) == pytest.approx(2 / math.sqrt(2 + 4), rel=1e-14)
    assert within_probability(-1.0, 1) == pytest.approx(0.5, rel=1e-14)
    assert within_probability(0.0, 7) == 0.0
    assert within_probability(1.959964, 100_001) == pytest.approx(0.95, abs=1e-5)


@pytest.mark.parametrize(("degrees", "confidence"), [(0, 0.95), (2, 0.0), (2, 1.0)])
def test_what_has_no_quantile_is_refused(degrees: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        t_quantile(degrees, confidence)


def test_a_paired_interval_is_that_of_a_sum_by_hand() -> None:
    one = paired({1: 3.01, 2: 3.12, 3: 3.23, 4: 9.0}, {1: 3.0, 2: 3.1, 3: 3.2, 5: 0.0})
    assert one.differences == pytest.approx((0.01, 0.02, 0.03))
    assert (one.pairs, one.mean) == (3, pytest.approx(0.02))
    assert one.standard_error == pytest.approx(0.01 / math.sqrt(3))
    assert one.interval == pytest.approx((0.02 - 0.0248414, 0.02 + 0.0248414), abs=1e-7)
    assert one.p == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-9)
    assert one.verdict is Verdict.NOT_TOLD_APART


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((-0.020, -0.021, -0.022), Verdict.BETTER),
        ((0.020, 0.021, 0.022), Verdict.WORSE),
        ((0.0, 0.0, 0.0), Verdict.NOT_TOLD_APART),
        ((0.5, 0.5, 0.5), Verdict.WORSE),
        ((-0.3,), Verdict.TOO_FEW),
        ((), Verdict.TOO_FEW),
        ((-0.02, math.inf, -0.02), Verdict.DIVERGED),
        ((-0.02, math.nan, -0.02), Verdict.DIVERGED),
    ],
)
def test_verdicts(differences: tuple[float, ...], verdict: Verdict) -> None:
    assert Paired(differences).verdict is verdict


def test_p_agrees_with_the_interval() -> None:
    reach = t_quantile(2) / math.sqrt(3)
    assert Paired((reach - 1, reach, reach + 1)).p == pytest.approx(0.05, abs=1e-12)
    assert Paired((0.0, 0.0)).p == 1.0
    assert Paired((0.1, 0.1)).p == 0.0
    assert math.isnan(Paired((0.1,)).p) and math.isnan(Paired((0.1, math.inf)).p)


def test_holm_takes_the_least_p_times_the_most() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": math.nan, "e": 0.9})
    assert [adjusted[name] for name in "abce"] == pytest.approx([0.04, 0.09, 0.09, 0.9])
    assert math.isnan(adjusted["d"])
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


def test_means_and_deviations_of_few_values() -> None:
    assert (mean([1.0, 2.0, 6.0]), deviation([1.0, 2.0, 6.0])) == (3.0, pytest.approx(math.sqrt(7)))
    assert math.isnan(mean([])) and math.isnan(deviation([1.0])) and math.isnan(deviation([1.0, math.inf]))


def test_where_a_curve_first_reaches_a_loss() -> None:
    curve = ((10.0, 5.0), (20.0, 3.0), (30.0, 4.0), (40.0, 2.0))
    assert first_reaching(curve, 4.5) == 12.5
    assert first_reaching(curve, 2.5) == 37.5
    assert first_reaching(curve, 5.0) == 10.0
    assert first_reaching(curve, 1.9) is None
    assert first_reaching(((1.0, math.inf), (2.0, 3.0)), 3.0) == 2.0


def test_between_the_points_of_a_curve() -> None:
    curve = ((10.0, 5.0), (20.0, 3.0), (30.0, 4.0))
    assert [interpolated(curve, at) for at in (10.0, 15.0, 27.5, 30.0)] == [5.0, 4.0, 3.75, 4.0]
    assert interpolated(curve, 9.0) is None and interpolated(curve, 31.0) is None
