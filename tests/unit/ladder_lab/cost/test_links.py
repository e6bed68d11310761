"""The step-time model against closed forms and a second recurrence."""

import random
from collections.abc import Callable, Sequence

import pytest

from ladder_lab.cost.links import SubBlockTime, WireModel, backward_seconds, forward_seconds
from megatron_ladder.blueprint.wiring import _limit_to_unseen

SERIAL, PIPELINED = WireModel(serial=True), WireModel(serial=False)


def layers(wiring: str, count: int, c: float, t: float) -> list[SubBlockTime]:
    """`count` layers whose attention and MLP take c each (backward twice that, half of it for weights)."""
    staleness = {
        "standard": (0, 0),
        "parallel": (0,),
        "ladder": (1, 1),
        "ladder-parallel": (1,),
        "staleness-2": (2, 2),
        "ladder-attention": (1, 0),
    }[wiring]
    c *= 2 // len(staleness)
    missing = _limit_to_unseen(range(1, late + 1) for late in staleness * count)
    return [SubBlockTime(c, t, backs, dgrad_seconds=c, wgrad_seconds=c) for backs in missing]


def a_layer(seconds: Callable[..., float], wiring: str, t: float, wire: WireModel) -> float:
    """Time of a layer amid many others: from the totals of two stacks."""
    few, many = (seconds(layers(wiring, count, 1.0, t), wire) for count in (30, 60))
    return (many - few) / 30


CLOSED_FORMS = [
    ("standard", lambda c, t: 2 * c + 2 * t, lambda c, t: 2 * c + 2 * t),
    ("parallel", lambda c, t: 2 * c + t, lambda c, t: 2 * c + t),
    ("ladder", lambda c, t: 2 * max(c, t), lambda c, t: c + max(c, t)),
    ("ladder-parallel", lambda c, t: max(2 * c, t), lambda c, t: max(2 * c, c + t / 2)),
    ("ladder-attention", lambda c, t: c + t + max(c, t), lambda c, t: 2 * c + t),
    ("staleness-2", lambda c, t: 2 * max(c, t), lambda c, t: max(2 * c, 2 * (c + t) / 3)),
]


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 1.75, 2.0, 3.0, 6.0])
@pytest.mark.parametrize(("wiring", "serial", "pipelined"), CLOSED_FORMS, ids=[form[0] for form in CLOSED_FORMS])
def test_closed_forms(wiring: str, serial, pipelined, t: float) -> None:
    for wire, form in ((SERIAL, serial), (PIPELINED, pipelined)):
        assert a_layer(forward_seconds, wiring, t, wire) == pytest.approx(form(1.0, t))
        # Backward is the mirror: the same form with its own compute time.
        assert a_layer(backward_seconds, wiring, t, wire) == pytest.approx(form(2.0, t))


def recurrence(
    blocks: Sequence[SubBlockTime], reads: Sequence[set[int]], serial: bool, computes: Sequence[float]
) -> float:
    """Starts and ends written as maxima: sub-block i starts when its predecessor and all that it reads are done."""
    now, wire_free, done = 0.0, 0.0, dict[int, float]()
    for index, block in enumerate(blocks):
        start = max([now, *(done[output] for output in reads[index])])
        now = start + computes[index]
        done[index] = wire_free = max(now, wire_free if serial else 0.0) + block.reduce_seconds
    return max([now, *done.values()])


@pytest.mark.parametrize("seed", range(20))
def test_random_stacks_follow_the_recurrence(seed: int) -> None:
    dice = random.Random(seed)
    missing = _limit_to_unseen(dice.choice(((), (1,), (1, 2), (2,))) for _ in range(dice.randrange(1, 25)))
    blocks = [SubBlockTime(dice.uniform(0, 2), dice.uniform(0, 3), backs, dice.uniform(0, 2)) for backs in missing]
    # Outputs in the stream when each sub-block reads it.
    reads = [
        {output for output in range(index) if index - output not in block.missing} for index, block in enumerate(blocks)
    ]
    # In backward sub-block j reads the gradients of all that read its output.
    order = list(reversed(range(len(blocks))))
    place = {index: position for position, index in enumerate(order)}
    mirrored = [{place[i] for i in range(len(blocks)) if j in reads[i]} for j in order]
    for wire in (SERIAL, PIPELINED):
        forward = recurrence(blocks, reads, wire.serial, [block.forward_seconds for block in blocks])
        assert forward_seconds(blocks, wire) == pytest.approx(forward)
        backward = recurrence(
            [blocks[j] for j in order], mirrored, wire.serial, [blocks[j].dgrad_seconds for j in order]
        )
        assert backward_seconds(blocks, wire) == pytest.approx(backward)
