"""The learning rate, compared with numbers calculated by hand."""

import math
from typing import Any

import pytest

from megatron_ladder.engine.optimizer import DecayStyle, LearningRateSchedule, WsdDecayStyle

BASE: dict[str, Any] = {"lr": 8.0, "min_lr": 2.0, "warmup_iters": 4, "decay_iters": 16}
HALF_ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("constant", {5: 8.0, 16: 8.0, 100: 8.0}),
        ("linear", {5: 7.5, 7: 6.5, 10: 5.0, 15: 2.5, 16: 2.0, 17: 2.0, 100: 2.0}),
        ("cosine", {7: 5 + 3 * HALF_ROOT, 8: 6.5, 10: 5.0, 12: 3.5, 13: 5 - 3 * HALF_ROOT, 16: 2.0, 17: 2.0}),
        ("inverse-square-root", {9: 8 * 2 / 3, 16: 4.0, 17: 2.0}),
    ],
)
def test_rates(style: DecayStyle, rates: dict[int, float]) -> None:
    schedule = LearningRateSchedule(**BASE, decay_style=style)
    warmup = {1: 2.0, 2: 4.0, 3: 6.0, 4: 8.0}
    for iteration, rate in (warmup | rates).items():
        assert schedule.at(iteration) == pytest.approx(rate, rel=1e-12), iteration


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("linear", {13: 6.5, 14: 5.0, 15: 3.5}),
        ("cosine", {13: 5 + 3 * HALF_ROOT, 14: 5.0, 15: 5 - 3 * HALF_ROOT}),
        ("exponential", {14: 2 + 6 * (math.sqrt(2) - 1), 13: 2 + 6 * (2**0.75 - 1)}),
        ("minus_sqrt", {13: 5.0, 14: 2 + 6 * (1 - HALF_ROOT)}),
    ],
)
def test_rates_of_warmup_stable_decay(style: WsdDecayStyle, rates: dict[int, float]) -> None:
    schedule = LearningRateSchedule(**BASE, decay_style="WSD", wsd_decay_iters=4, wsd_decay_style=style)
    around = {1: 2.0, 4: 8.0, 5: 8.0, 12: 8.0, 16: 2.0, 17: 2.0}
    for iteration, rate in (around | rates).items():
        assert schedule.at(iteration) == pytest.approx(rate, rel=1e-12), iteration


def test_inverse_square_root_without_warmup_and_with_a_floor() -> None:
    schedule = LearningRateSchedule(8.0, 1000, min_lr=1.0, decay_style="inverse-square-root")
    assert [schedule.at(n) for n in (1, 4, 16, 64, 81, 1000)] == [8.0, 4.0, 2.0, 1.0, 1.0, 1.0]


def test_end_of_warmup_is_exactly_the_rate() -> None:
    for iterations in range(1, 200):
        schedule = LearningRateSchedule(3e-4, 1000, warmup_iters=iterations)
        assert schedule.at(iterations) == 3e-4


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD"])
def test_no_room_for_decay_is_no_division_by_zero(style: DecayStyle) -> None:
    schedule = LearningRateSchedule(8.0, 4, min_lr=2.0, warmup_iters=4, decay_style=style)
    assert [schedule.at(n) for n in (4, 5)] == [8.0, 2.0]
    assert LearningRateSchedule(8.0, 4, decay_style="WSD", wsd_decay_iters=0).at(4) == 8.0
