"""The time of passes with divided experts against closed forms, for every wiring."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest

from ladder_lab.bench.sizes import SIZES
from ladder_lab.cost.divided_experts import PassTime, Schedule, forward_events, pass_times
from ladder_lab.cost.links import SubBlockTime, WireModel
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.tensors import SubBlockTensors, layer_tensors
from megatron_ladder.blueprint.wiring import BranchKind

Form = Callable[[float], float]
ATTENTION, SHARED, ROUTED = 6.0, 2.0, 7.0
"""Forward seconds. The output projection is a third of attention, and a half of the shared expert."""
WGRAD = 1 / 2
"""Weight gradients relative to forward; half of them are the output projection's, but for experts."""
AS_TRAINED = Schedule()


def times_of(sub_block: SubBlockTensors, wire: float) -> SubBlockTime:
    wired = sub_block.wired
    if wired.moves_tokens:
        return SubBlockTime(ROUTED, wire, wired.missing, ROUTED, WGRAD * ROUTED, read_seconds=wire, moves_tokens=True)
    kinds = [branch.kind for branch in sub_block.branches]
    attention = ATTENTION * kinds.count(BranchKind.MIXER)
    shared = SHARED * kinds.count(BranchKind.MLP)
    forward = attention + shared
    half = WGRAD * forward / 2
    joins, shares = wired.joins_next, wired.shares_input
    output = attention / 3 + shared / 2
    return SubBlockTime(
        forward, 0, wired.missing, forward, half, joins, shares, output_seconds=output, output_wgrad_seconds=half
    )


def blocks_of(wiring: str, layers: int, wire: float, shared: bool = True) -> list[SubBlockTime]:
    model = replace(SIZES["small-moe"], num_layers=layers, moe_layers=tuple(range(layers)))
    if not shared:
        model = replace(model, moe_shared_expert_intermediate_size=0)
    tensors = chain.from_iterable(layer_tensors(NAMED_WIRINGS[wiring].of(model, 1), divides_experts=True))
    return [times_of(sub_block, wire) for sub_block in tensors]


def a_layer(
    wiring: str, wire: float, schedule: Schedule = AS_TRAINED, shared: bool = True, recompute: bool = False
) -> tuple[float, float]:
    """Return the seconds of forward and backward of a layer amid many others, from the totals of two stacks."""
    few, many = (
        pass_times(blocks_of(wiring, layers, wire, shared), WireModel(), 0.0, schedule, recompute) for layers in (8, 16)
    )
    forward, backward = ((more.seconds - less.seconds) / 8 for less, more in zip(few, many, strict=True))
    return forward, backward


A, S, R = ATTENTION, SHARED, ROUTED
FORWARD: dict[str, Form] = {
    # Under the halves of the shared expert.
    "standard": lambda t: A + R + 2 * max(S / 2, t),
    # Dispatch under the output projection of attention and S; combine under the rest of attention.
    "ladder": lambda t: R + max(2 / 3 * A, t) + max(A / 3 + S, t),
    "farskip": lambda t: R + max(2 / 3 * A, t) + max(A / 3 + S, t),
    "ladder-attention": lambda t: R + max(A, t) + max(S, t),
    "shortcut": lambda t: R + max(A, t) + max(S, t),
}
"""Seconds of forward by those of an all-to-all t: at least those of all computation."""


@pytest.mark.parametrize("wire", [0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 9.0])
@pytest.mark.parametrize("wiring", FORWARD)
def test_forward_is_the_closed_form(wiring: str, wire: float) -> None:
    assert a_layer(wiring, wire)[0] == pytest.approx(FORWARD[wiring](wire))


@pytest.mark.parametrize("wire", [0.0, 0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("wiring", [*FORWARD, "staleness-2", "parallel", "ladder-parallel"])
def test_backward_without_weight_gradients_is_the_mirror(wiring: str, wire: float) -> None:
    """Its all-to-alls travel under the same bodies as forward's."""
    blocks = [replace(block, wgrad_seconds=0.0, output_wgrad_seconds=0.0) for block in blocks_of(wiring, 6, wire)]
    forward, backward = pass_times(blocks, WireModel(), 0.0, AS_TRAINED, recompute=False)
    assert backward.seconds == pytest.approx(forward.seconds)


@pytest.mark.parametrize("wire", [0.5, 2.0, 4.0, 4.8, 6.0])
def test_late_weight_gradients_hide_the_all_to_alls_of_backward(wire: float) -> None:
    computing = (1 + WGRAD) * (A + S + R)
    late = a_layer("standard", wire)[1]
    at_once = a_layer("standard", wire, Schedule(late_weight_gradients=False))[1]
    blocked = a_layer("standard", wire, Schedule(reads_ahead=False, late_weight_gradients=False))[1]
    # Combine' travels under the gradients of S's projection and the weights of attention, dispatch' under the rest of S
    # and the weights of R.
    under_combine = S / 2 + WGRAD * (S / 2 + A)
    under_dispatch = S / 2 + WGRAD * (S / 2 + R)
    assert late == pytest.approx(computing + max(0.0, wire - under_combine) + max(0.0, wire - under_dispatch))
    assert blocked == pytest.approx(computing + wire + max(0.0, wire - WGRAD * R))
    assert late <= at_once <= blocked


@pytest.mark.parametrize("wire", [2.0, 6.0, 7.0, 10.0])
def test_tokens_travel_for_a_layer_with_staleness_2(wire: float) -> None:
    """Dispatch starts behind attention of the layer before."""
    assert a_layer("staleness-2", wire)[0] == pytest.approx(max(A, wire) + max(S + R, wire))


@pytest.mark.parametrize("wiring", ["standard", "farskip"])
def test_recomputation_dispatches_again_under_other_sub_blocks(wiring: str) -> None:
    kept = a_layer(wiring, 0.0)[1]
    assert a_layer(wiring, 0.0, recompute=True)[1] == pytest.approx(kept + A + S + R)
    assert a_layer(wiring, 0.5, recompute=True)[1] == pytest.approx(kept + A + S + R)


def test_without_a_shared_expert_farskip_reads_inside_attention() -> None:
    assert a_layer("standard", 2.0, shared=False)[0] == pytest.approx(A + R + 2 * 2.0)
    assert a_layer("farskip", 2.0, shared=False)[0] == pytest.approx(A + R)


def test_what_is_hidden_is_the_share_of_the_wire() -> None:
    forward, _ = pass_times(blocks_of("standard", 1, 2.0), WireModel(), 0.0, AS_TRAINED, recompute=False)
    assert forward == PassTime(A + R + 2 * 2.0, 4.0, (S / 2 + S / 2) / 4.0)


def test_contention_slows_what_runs_under_an_all_to_all() -> None:
    blocks = blocks_of("standard", 1, 0.5)
    free, slowed = (
        pass_times(blocks, WireModel(), share, AS_TRAINED, recompute=False)[0].seconds for share in (0.0, 0.2)
    )
    assert slowed - free == pytest.approx(0.2 * 2 * 0.5)


@pytest.mark.parametrize("wiring", [*FORWARD, "staleness-2", "parallel", "ladder-parallel"])
@pytest.mark.parametrize("reads_ahead", [True, False])
def test_each_sub_block_waits_for_what_it_sees_and_for_its_input(wiring: str, reads_ahead: bool) -> None:
    blocks = blocks_of(wiring, 5, 1.0)
    events = forward_events(blocks, Schedule(reads_ahead))
    at = {event: place for place, event in enumerate(events)}
    assert len(at) == len(events)
    for position, block in enumerate(blocks):
        launched, awaited = (at[event] for event in [("launch", "input", position), ("wait", "input", position)])
        begin, end = (at["compute", part, position] for part in ("work", "projection"))
        assert launched < awaited < begin < end
        if ("launch", "output", position) in at:
            assert at["launch", "output", position] > end
        seen = [output for output in range(position) if position - output not in block.missing]
        for output in seen:
            if ("wait", "output", output) in at:
                assert at["wait", "output", output] < launched
        for back in block.missing:
            if ("wait", "output", position - back) in at:
                assert at["wait", "output", position - back] > launched
