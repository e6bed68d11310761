"""What sub-blocks miss, and when each output is first seen."""

from collections.abc import Sequence
from typing import Any

import pytest

from megatron_ladder.blueprint.wiring import ReadPlan, plan_reads
from tests.helpers.sharded import small_model


@pytest.mark.parametrize(
    ("missing", "first_reads"),
    [
        ([(), (), ()], (1, 2, 3)),
        ([(1,), (1,), (1,), (1,)], (2, 3, 4, 4)),
        ([(1, 2), (1, 2), (1, 2), (1, 2)], (3, 4, 4, 4)),
        # Standard after ladder first adds all outputs.
        ([(1,), (1,), (), ()], (2, 2, 3, 4)),
        # The output of 1 arrives after that of 2.
        ([(), (), (1,), (2,), ()], (1, 4, 3, 4, 5)),
    ],
)
def test_first_reads(missing: Sequence[tuple[int, ...]], first_reads: tuple[int, ...]) -> None:
    assert ReadPlan.of(missing).first_reads == first_reads


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ([(), (), (2,)], "sub-block 2 misses output 2 before it"),
        ([(), (1,), (1,), (1, 3)], "sub-block 3 misses output 3 before it"),
        ([(), (0,)], "sub-block 1 misses output 0 before it"),
    ],
)
def test_an_output_that_was_seen_cannot_be_missing(missing: Sequence[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReadPlan.of(missing)


@pytest.mark.parametrize(
    ("changes", "pending"),
    [
        ({"ladder_layers": (1, 2)}, [0, 1, 1, 0, 0]),
        # Outputs that the preceding standard layer has seen cannot be missing again.
        ({"ladder_layers": (1, 2), "residual_staleness": 2}, [0, 1, 2, 0, 0]),
    ],
)
def test_cuts_carry_what_the_next_sub_block_misses(changes: dict[str, Any], pending: list[int]) -> None:
    plan = plan_reads(small_model(num_layers=4, residual_mode="ladder", **changes).wired_layers)
    assert [len(plan.missing(2 * layer)) for layer in range(5)] == pending
