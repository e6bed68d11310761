"""Detection of loss spikes, and the number of consecutive bad steps that ends a run."""

import copy
import math

import pytest

from megatron_ladder.config.sections import ReliabilityConfig
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.train.guards import Finding, Guard

BAD = Finding("bad numbers", True, "iteration 9: the loss is nan")


def test_a_spike_is_above_a_multiple_of_the_median() -> None:
    guard = Guard(ReliabilityConfig(loss_spike_factor=1.5, loss_spike_window=5))
    # Nothing is a spike before the window is full.
    assert [guard.judge(loss, 1.0) for loss in (2.0, 9.0, 4.0, 3.0, 5.0)] == [None] * 5
    assert [guard.judge(0.0, 0.0, has_targets=False) for _ in range(5)] == ["no targets"] * 5
    # The median of 2, 3, 4, 5, 9 is 4.
    assert copy.deepcopy(guard).judge(6.1, 1.0) == "loss spike"
    assert guard.judge(6.0, 1.0) is None
    # The median of 3, 4, 5, 6, 9 is 5.
    assert guard.judge(7.6, 1.0) == "loss spike"


def test_losses_that_stay_high_become_normal() -> None:
    guard = Guard(ReliabilityConfig(loss_spike_factor=2.0, loss_spike_window=5))
    found = [guard.judge(loss, 1.0) for loss in [1.0] * 5 + [3.0] * 4]
    assert found == [None] * 5 + ["loss spike"] * 3 + [None]


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_consecutive_bad_steps_end_the_run(loss: float, norm: float) -> None:
    guard = Guard(ReliabilityConfig(max_consecutive_bad_steps=2))
    assert guard.judge(loss, norm) == "bad numbers"
    guard.stop_if_hopeless(BAD)
    assert guard.judge(1.0, 1.0) is None
    assert guard.judge(loss, norm) == "bad numbers"
    guard.stop_if_hopeless(BAD)
    assert guard.judge(loss, norm) == "bad numbers"
    guard.stop_if_hopeless(None)
    with pytest.raises(BadNumbersError, match="^iteration 9: the loss is nan: 2 in a row, as many as --max-cons"):
        guard.stop_if_hopeless(BAD)


def test_a_resumed_run_makes_the_same_decisions() -> None:
    config = ReliabilityConfig(loss_spike_factor=1.5, loss_spike_window=3, max_consecutive_bad_steps=2)
    guard, resumed = Guard(config), Guard(config)
    for loss in (1.0, 2.0, 3.0, 4.0, math.nan):
        guard.judge(loss, 1.0)
    resumed.set_state(guard.state())
    assert guard.state() == {"bad_in_a_row": 1, "losses": [2.0, 3.0, 4.0]}
    assert resumed.judge(4.6, 1.0) == guard.judge(4.6, 1.0) == "loss spike"
    fresh = Guard(config)
    fresh.set_state({})
    assert fresh.state() == {"bad_in_a_row": 0, "losses": []}
