"""The learning rate, compared with numbers calculated by hand."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from megatron_ladder.config.sections import OptimizerConfig
from megatron_ladder.engine.optimizer import learning_rate

BASE: dict[str, Any] = {"lr": 8.0, "min_lr": 2.0, "lr_warmup_iters": 4, "lr_decay_iters": 16}
HALF_ROOT = math.sqrt(0.5)


def schedule(**config: Any) -> Callable[[int], float]:
    return partial(learning_rate, OptimizerConfig(**config), 1000)


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("constant", {5: 8.0, 16: 8.0, 100: 8.0}),
        ("linear", {5: 7.5, 7: 6.5, 10: 5.0, 15: 2.5, 16: 2.0, 17: 2.0, 100: 2.0}),
        ("cosine", {7: 5 + 3 * HALF_ROOT, 8: 6.5, 10: 5.0, 12: 3.5, 13: 5 - 3 * HALF_ROOT, 16: 2.0, 17: 2.0}),
        ("inverse-square-root", {9: 8 * 2 / 3, 16: 4.0, 17: 2.0}),
        ("WSD linear", {13: 6.5, 14: 5.0, 15: 3.5}),
        ("WSD cosine", {13: 5 + 3 * HALF_ROOT, 14: 5.0, 15: 5 - 3 * HALF_ROOT}),
        ("WSD exponential", {14: 2 + 6 * (math.sqrt(2) - 1), 13: 2 + 6 * (2**0.75 - 1)}),
        ("WSD minus_sqrt", {13: 5.0, 14: 2 + 6 * (1 - HALF_ROOT)}),
    ],
)
def test_rates(style: str, rates: dict[int, float]) -> None:
    style, *decay = style.split()
    rate_at = schedule(**BASE, lr_decay_style=style)
    around = {1: 2.0, 2: 4.0, 3: 6.0, 4: 8.0}
    if decay:
        rate_at = schedule(**BASE, lr_decay_style=style, lr_wsd_decay_iters=4, lr_wsd_decay_style=decay[0])
        around |= {5: 8.0, 12: 8.0, 16: 2.0, 17: 2.0}
    for iteration, rate in (around | rates).items():
        assert rate_at(iteration) == pytest.approx(rate, rel=1e-12), iteration


def test_inverse_square_root_without_warmup_and_with_a_floor() -> None:
    rate_at = schedule(lr=8.0, min_lr=1.0, lr_decay_style="inverse-square-root")
    assert [rate_at(n) for n in (1, 4, 16, 64, 81, 1000)] == [8.0, 4.0, 2.0, 1.0, 1.0, 1.0]


def test_end_of_warmup_is_exactly_the_rate() -> None:
    for iterations in range(1, 200):
        assert schedule(lr=3e-4, lr_warmup_iters=iterations)(iterations) == 3e-4


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD"])
def test_no_room_for_decay_is_no_division_by_zero(style: str) -> None:
    rate_at = schedule(lr=8.0, min_lr=2.0, lr_warmup_iters=4, lr_decay_iters=4, lr_decay_style=style)
    assert [rate_at(n) for n in (4, 5)] == [8.0, 2.0]
