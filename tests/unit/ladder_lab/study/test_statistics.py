"""Statistics of paired runs, compared with printed tables and values computed by hand."""

import math

import pytest

from ladder_lab.study.statistics import (
    LossVerdict,
    Paired,
    deviation,
    first_reaching,
    holm,
    mean,
    paired,
)


@pytest.mark.parametrize(
    ("degrees", "at_95"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (29, 2.045), (120, 1.980)]
)
def test_quantiles_match_printed_tables(degrees: int, at_95: float) -> None:
    one = Paired(tuple(map(float, range(degrees + 1))))
    assert round(one.half_width / one.standard_error, 3) == at_95


def test_a_paired_interval_matches_a_hand_computation() -> None:
    one = paired({1: 3.01, 2: 3.12, 3: 3.23, 4: 9.0}, {1: 3.0, 2: 3.1, 3: 3.2, 5: 0.0})
    assert one.differences == pytest.approx((0.01, 0.02, 0.03))
    assert (one.pairs, one.mean) == (3, pytest.approx(0.02))
    assert one.standard_error == pytest.approx(0.01 / math.sqrt(3))
    assert one.interval == pytest.approx((0.02 - 0.0248414, 0.02 + 0.0248414), abs=1e-7)
    assert one.p == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-9)
    assert one.verdict is LossVerdict.NO_DIFFERENCE


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((-0.020, -0.021, -0.022), LossVerdict.BETTER),
        ((0.020, 0.021, 0.022), LossVerdict.WORSE),
        ((0.0, 0.0, 0.0), LossVerdict.NO_DIFFERENCE),
        ((0.5, 0.5, 0.5), LossVerdict.WORSE),
        ((-0.3,), LossVerdict.TOO_FEW),
        ((), LossVerdict.TOO_FEW),
        ((-0.02, math.inf, -0.02), LossVerdict.DIVERGED),
        ((-0.02, math.nan, -0.02), LossVerdict.DIVERGED),
    ],
)
def test_verdicts(differences: tuple[float, ...], verdict: LossVerdict) -> None:
    assert Paired(differences).verdict is verdict


def test_p_agrees_with_the_interval() -> None:
    reach = Paired((-1.0, 0.0, 1.0)).half_width
    assert Paired((reach - 1, reach, reach + 1)).p == pytest.approx(0.05, abs=1e-12)
    assert Paired((0.0, 0.0)).p == 1.0
    assert Paired((0.1, 0.1)).p == 0.0
    assert math.isnan(Paired((0.1,)).p) and math.isnan(Paired((0.1, math.inf)).p)


def test_holm_multiplies_the_smallest_p_by_the_number_of_comparisons() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": math.nan, "e": 0.9})
    assert [adjusted[name] for name in "abce"] == pytest.approx([0.04, 0.09, 0.09, 0.9])
    assert math.isnan(adjusted["d"])
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


def test_means_and_deviations_of_few_values() -> None:
    assert (mean([1.0, 2.0, 6.0]), deviation([1.0, 2.0, 6.0])) == (3.0, pytest.approx(math.sqrt(7)))
    assert math.isnan(mean([])) and math.isnan(deviation([1.0])) and math.isnan(deviation([1.0, math.inf]))


def test_first_position_that_reaches_a_loss() -> None:
    curve = ((10.0, 5.0), (20.0, 3.0), (30.0, 4.0), (40.0, 2.0))
    assert first_reaching(curve, 4.5) == 12.5
    assert first_reaching(curve, 2.5) == 37.5
    assert first_reaching(curve, 5.0) == 10.0
    assert first_reaching(curve, 1.9) is None
    assert first_reaching(((1.0, math.inf), (2.0, 3.0)), 3.0) == 2.0
