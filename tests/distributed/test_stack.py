"""The order of launches, waits and computations in the stack, and ranges of layers that are chained."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.model.own_partials import _OwnPartialsBackward
from megatron_ladder.model.stack import StackOptions
from tests.helpers.pool import GlooPools
from tests.helpers.recording import HYBRID, LADDER, PARALLEL, InlineQueue, recorded_model
from tests.helpers.sharded import small_model

LADDER_PARALLEL = {"residual_mode": "ladder-parallel", "ladder_layers": (0, 1, 2)}
STALENESS_2 = LADDER | {"residual_staleness": 2}
DESYNC_2 = {"residual_mode": "desync", "desync_interval": 2, "desync_tp": 2}
DESYNC_4 = DESYNC_2 | {"desync_interval": 4}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 8, "ladder_layers": (0, 1, 2)}
SHARED = EXPERTS | {"moe_layers": (0, 2), "moe_shared_expert_intermediate_size": 8}
WIRINGS: dict[str, dict[str, Any]] = {
    "standard": {},
    "ladder": LADDER,
    "ladder-qk-norm": LADDER | {"qk_layernorm": True},
    "ladder-lanes": LADDER | {"lanes": 2},
    "hybrid": HYBRID,
    "parallel": PARALLEL,
    "ladder-parallel": LADDER_PARALLEL,
    "staleness-2": STALENESS_2,
    "ladder-attention": {"residual_mode": "ladder-attention", "ladder_layers": (0, 1, 2)},
    "desync-2": DESYNC_2,
    "desync-4": DESYNC_4,
    "lanes": STALENESS_2 | {"lanes": 2},
    "farskip-without-shared": EXPERTS | {"residual_mode": "farskip", "moe_layers": (0, 1, 2)},
    "farskip": SHARED | {"residual_mode": "farskip"},
    "shortcut": SHARED | {"residual_mode": "shortcut"},
    "longcat": EXPERTS | {"moe_layers": (0,), "residual_mode": "longcat"},
}


def stack_events(
    config: ModelConfig,
    options: StackOptions,
    training: bool = True,
    sharded: bool = False,
    frozen: str | None = None,
) -> tuple[str, str]:
    """Return the events of the stack's forward pass and, with `training`, of its backward pass.

    With `frozen`, parameters whose names match it are frozen, and the state that enters needs no gradient.
    They are launches and waits of reduces (`L3`, `W3`) and gathers (`G3`, `H3`), numbered by sub-block, and sums that
    are waited for at once (`S`); in forward, starts of bodies (`B3`); in backward, recomputations (`B3`), gradients of
    first weights (`D3`), and gathers of inputs (`X3`, `Y3`).
    """
    model, group = recorded_model(config, options, sequence_parallel=sharded)
    model.stack.side_queue = InlineQueue() if sharded else None
    steps, hooks = model.stack.sub_blocks(), []
    for number, step in enumerate(steps):
        assert isinstance(step.body, nn.Module)
        hooks.append(step.body.register_forward_pre_hook(lambda *_, name=f"B{number}": group.events.append(name)))
    with torch.set_grad_enabled(training):
        needs_gradient = training and frozen is None
        state = torch.randn(1, 6 if sharded else 12, 2, config.hidden_size, requires_grad=needs_gradient)
        for name, parameter in model.stack.named_parameters():
            parameter.requires_grad_(frozen is None or not re.search(frozen, name))
        output, _ = model.stack(state, model.training_context(torch.arange(24).view(2, 12)))
    forward, reduces, gathers = " ".join(group.events), group.started, group.gathers
    group.events.clear()
    if not training:
        return forward, ""
    for number, (step, hook) in enumerate(zip(steps, hooks, strict=True)):
        hook.remove()
        step.norm.register_forward_pre_hook(lambda *_, name=f"B{number}": group.events.append(name))
        for path, parameter in step.body.named_parameters():
            is_first = path.removeprefix("lanes.0.") in ("in_proj.weight", "gate_up_proj.weight")
            if is_first and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda weight, name=f"D{number}": group.events.extend([] if weight.grad is None else [name])
                )
    output.sum().backward()

    def named(event: str) -> str:
        kind, number = event[0], event[1:]
        if kind in "LW":
            return f"{kind}{len(steps) - 1 - (int(number) - reduces)}"
        if kind in "GH":
            # The input of a sub-block is gathered before its gradient.
            index, is_gradient = divmod(int(number) - gathers, 2)
            return f"{kind if is_gradient else {'G': 'X', 'H': 'Y'}[kind]}{len(steps) - 1 - index}"
        return event

    return forward, " ".join(map(named, group.events))


def without(kinds: str, events: str) -> str:
    return " ".join(event for event in events.split() if event[0] not in kinds)


LADDER_FORWARD = "B0 L0 B1 L1 W0 B2 L2 W1 B3 L3 W2 B4 L4 W3 B5 L5 W4 W5"
LADDER_BACKWARD = "L5 L4 W5 L3 W4 L2 W3 L1 W2 L0 W1 W0"
STALENESS_2_FORWARD = "B0 L0 B1 L1 B2 L2 W0 B3 L3 W1 B4 L4 W2 B5 L5 W3 W4 W5"
STALENESS_2_BACKWARD = "L5 L4 L3 W5 L2 W4 L1 W3 L0 W2 W1 W0"


@pytest.mark.parametrize(
    ("wiring", "forward", "backward"),
    [
        (
            "standard",
            "B0 L0 W0 B1 L1 W1 B2 L2 W2 B3 L3 W3 B4 L4 W4 B5 L5 W5",
            "L5 W5 L4 W4 L3 W3 L2 W2 L1 W1 L0 W0",
        ),
        ("ladder", LADDER_FORWARD, LADDER_BACKWARD),
        ("ladder-qk-norm", LADDER_FORWARD, LADDER_BACKWARD),
        ("hybrid", "B0 L0 W0 B1 L1 B2 L2 W1 B3 L3 W2 W3 B4 L4 W4 B5 L5 W5", "L5 W5 L4 W4 L3 L2 W3 L1 W2 W1 L0 W0"),
        ("parallel", "B0 L0 W0 B1 L1 W1 B2 L2 W2", "L2 W2 L1 W1 L0 W0"),
        ("ladder-parallel", "B0 L0 B1 L1 W0 B2 L2 W1 W2", "L2 L1 W2 L0 W1 W0"),
        ("staleness-2", STALENESS_2_FORWARD, STALENESS_2_BACKWARD),
        (
            "ladder-attention",
            "B0 L0 W0 B1 L1 B2 L2 W1 W2 B3 L3 B4 L4 W3 W4 B5 L5 W5",
            "L5 W5 L4 L3 W4 W3 L2 L1 W2 W1 L0 W0",
        ),
        # In backward, the gradients of the stream and of the norm that reads it share one reduce.
        ("desync-2", "B0 B1 L0 W0 B2 B3 L1 W1 B4 B5 L2 W2", "S S S"),
        ("desync-4", "B0 B1 B2 B3 L0 W0 B4 B5 L1 W1", "S S"),
        ("lanes", STALENESS_2_FORWARD, STALENESS_2_BACKWARD),
        ("farskip-without-shared", LADDER_FORWARD, LADDER_BACKWARD),
        # Attention, shared, routed; attention, MLP; attention, shared, routed. Attention travels with what follows it,
        # and the experts of a layer share an input and its reduce, so two numbers are not used in backward.
        (
            "farskip",
            "B0 B1 L0 B2 L1 W0 B3 W1 B4 L2 W2 B5 B6 L3 B7 L4 W3 W4",
            "L7 L6 W7 W6 L5 L4 W5 W4 L3 L2 W3 W2",
        ),
        # Attention, routed, shared; attention, MLP; attention, routed, shared.
        (
            "shortcut",
            "B0 L0 B1 L1 W0 B2 L2 W1 W2 B3 L3 W3 B4 L4 W4 B5 L5 B6 L6 W5 B7 L7 W6 W7",
            "L7 L6 W7 L5 W6 W5 L4 W4 L3 W3 L2 L1 W2 L0 W1 W0",
        ),
        # Attention, routed, MLP, attention, MLP; the other layers without routed. Routed and MLP share an input.
        (
            "longcat",
            "B0 L0 W0 B1 L1 B2 L2 W2 B3 L3 W3 B4 L4 W1 W4 "
            + " ".join(f"B{number} L{number} W{number}" for number in range(5, 13)),
            " ".join(f"L{number} W{number}" for number in reversed(range(1, 13))),
        ),
    ],
)
def test_reduces_stay_in_flight_and_backward_mirrors_forward(
    gloo_pools: GlooPools, wiring: str, forward: str, backward: str
) -> None:
    """Forward, the order does not depend on autograd or recomputation."""
    config = small_model(num_layers=3, **WIRINGS[wiring])
    for training, recompute in itertools.product((True, False), (0, 3)):
        for found, mirrored in gloo_pools(2).run(
            stack_events, config, StackOptions(recompute_layers=recompute), training
        ):
            assert found == forward
            # Recomputed sub-blocks do not share an input.
            if not recompute or wiring not in ("farskip", "longcat"):
                assert without("BD", mirrored) == (backward if training else "")


@pytest.mark.parametrize("wiring", ["ladder", "ladder-lanes"])
def test_recomputation_runs_under_the_reduces_and_repeats_none(gloo_pools: GlooPools, wiring: str) -> None:
    config = small_model(num_layers=3, **WIRINGS[wiring])
    expected = {
        2: "L5 L4 B3 W5 L3 B2 W4 L2 B1 W3 L1 B0 W2 L0 W1 W0",
        3: "B5 L5 B4 L4 B3 W5 L3 B2 W4 L2 B1 W3 L1 B0 W2 L0 W1 W0",
    }
    for recompute, events in expected.items():
        for _, found in gloo_pools(2).run(stack_events, config, StackOptions(recompute_layers=recompute)):
            assert without("D", found) == events


@pytest.mark.parametrize(
    ("wiring", "frozen", "backward"),
    [
        ("standard", r"layers\.0\.", "L5 D5 W5 L4 D4 W4 L3 D3 W3 L2 D2 W2"),
        ("standard", r"layers\.0\.|norm", "L5 D5 W5 L4 D4 W4 L3 D3 W3 D2"),
        ("standard", r"layers\.[02]\.", "L5 W5 L4 W4 L3 D3 W3 L2 D2 W2"),
        # Inputs 2 and 3 lack output 2. They are reduced for their norms, after everything else.
        ("ladder", r"layers\.0\.", "L5 D5 L4 D4 W5 L3 D3 W4 L2 D2 W3 W2"),
        ("ladder", r"layers\.0\.|norm", "L5 D5 L4 D4 W5 D3 W4 D2"),
        # Only input 4 contains output 2, and sub-block 3 keeps no graph.
        ("ladder", r"layers\.[02]\.|1\.bodies\.mlp|norm", "L5 L4 W5 W4 D2"),
        ("ladder", r"layers\.[12]\.", "L5 L4 W5 L3 W4 L2 W3 L1 D1 W2 L0 D0 W1 W0"),
        ("staleness-2", r"layers\.0\.|norm", "L5 D5 D4 D3 W5 D2"),
        # Input 3 gives its gradient to the part of output 2 that it contains.
        ("ladder-lanes", r"layers\.0\.|norm", "L5 D5 L4 D4 W5 L3 D3 W4 D2 W3"),
        # Sub-blocks 6 and 7 share an input, and so do their numbers of launches; input 5 is the second one.
        ("farskip", r"layers\.0\.|norm", "L7 D6 L6 D5 W7 W6 D4 D3"),
    ],
)
def test_backward_ends_where_nothing_below_trains(
    gloo_pools: GlooPools, wiring: str, frozen: str, backward: str
) -> None:
    config = small_model(num_layers=3, **WIRINGS[wiring])
    # Recomputed sub-blocks do not share an input.
    for recompute in (0,) if wiring == "farskip" else (0, 3):
        for _, found in gloo_pools(2).run(
            stack_events, config, StackOptions(recompute_layers=recompute), True, False, frozen
        ):
            assert without("B", found) == backward


def test_standard_overlaps_the_reduce_with_the_weight_gradient(gloo_pools: GlooPools) -> None:
    """Megatron's overlap, the baseline for ladder."""
    for _, found in gloo_pools(2).run(stack_events, small_model(num_layers=2), StackOptions()):
        assert found == " ".join(f"L{i} D{i} W{i}" for i in (3, 2, 1, 0))


def test_no_overlap_waits_at_once(gloo_pools: GlooPools) -> None:
    config = small_model(num_layers=3, **LADDER)
    options = StackOptions(tp_overlap=False, recompute_layers=2)
    for forward, backward in gloo_pools(2).run(stack_events, config, options):
        assert forward == " ".join(f"B{i} L{i} W{i}" for i in range(6))
        assert without("D", backward) == "S S B3 S B2 S B1 S B0 S"


@pytest.mark.parametrize(
    ("wiring", "expected"),
    [
        ("standard", "G0 H0 B0 L0 W0 G1 H1 B1 L1 W1 G2 H2 B2 L2 W2 G3 H3 B3 L3 W3 G4 H4 B4 L4 W4 G5 H5 B5 L5 W5"),
        # When sub-block 1 starts: the wait for reduce 0, add, norm, and the gather for sub-block 2.
        ("ladder", "G0 G1 H0 B0 L0 W0 G2 H1 B1 L1 W1 G3 H2 B2 L2 W2 G4 H3 B3 L3 W3 G5 H4 B4 L4 H5 B5 L5 W4 W5"),
        ("hybrid", "G0 H0 B0 L0 W0 G1 G2 H1 B1 L1 W1 G3 H2 B2 L2 H3 B3 L3 W2 W3 G4 H4 B4 L4 W4 G5 H5 B5 L5 W5"),
        ("ladder-parallel", "G0 G1 H0 B0 L0 W0 G2 H1 B1 L1 H2 B2 L2 W1 W2"),
        (
            "staleness-2",
            "G0 G1 H0 B0 L0 G2 H1 B1 L1 W0 G3 H2 B2 L2 W1 G4 H3 B3 L3 W2 G5 H4 B4 L4 H5 B5 L5 W3 W4 W5",
        ),
    ],
)
def test_sharded_stream_is_read_under_the_previous_sub_block(gloo_pools: GlooPools, wiring: str, expected: str) -> None:
    config = small_model(num_layers=3, **WIRINGS[wiring])
    for training, recompute in itertools.product((True, False), (0, 3)):
        options = StackOptions(recompute_layers=recompute)
        assert {forward for forward, _ in gloo_pools(2).run(stack_events, config, options, training, True)} == {
            expected
        }


@pytest.mark.parametrize(
    ("wiring", "recompute", "expected"),
    [
        ("parallel", 0, "X2 G2 H2 X1 L2 Y2 W2 G1 H1 X0 L1 Y1 W1 G0 H0 L0 Y0 W0"),
        # Under the backward of sub-block 1: the input of 0, the wait for reduce 2, norm, add, and the gather for 0.
        ("ladder-parallel", 0, "X2 G2 H2 X1 G1 L2 Y2 H1 X0 W2 G0 L1 Y1 H0 L0 Y0 W1 W0"),
        ("ladder-parallel", 3, "X2 Y2 G2 H2 X1 G1 L2 Y1 H1 X0 W2 G0 L1 Y0 H0 L0 W1 W0"),
    ],
)
def test_backward_of_a_sharded_stream_mirrors_the_forward_order(
    gloo_pools: GlooPools, wiring: str, recompute: int, expected: str
) -> None:
    config, options = small_model(num_layers=3, **WIRINGS[wiring]), StackOptions(recompute_layers=recompute)
    for _, backward in gloo_pools(2).run(stack_events, config, options, True, True):
        assert without("BD", backward) == expected


def middle_range_events(config: ModelConfig) -> tuple[str, list[int]]:
    """Run forward and backward over layer 1 of 3, and return the launches and waits of backward, and how many unreduced
    gradients were kept for outputs of the layer after each sub-block."""
    model, group = recorded_model(config, StackOptions(), layers=range(1, 2))
    # The stream, and the outputs of layer 0, which sub-block 2 misses.
    state = torch.randn(3, 12, 2, config.hidden_size, requires_grad=True)
    output, _ = model.stack(state, model.training_context(torch.arange(24).view(2, 12)))
    group.events.clear()
    group.started = 0
    kept: list[int] = []
    differentiate = _OwnPartialsBackward._differentiate

    def counting(walk: _OwnPartialsBackward, *args: Any) -> None:
        differentiate(walk, *args)
        kept.append(len({id(unreduced) for inputs in walk._unreduced.values() for unreduced in inputs}))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_OwnPartialsBackward, "_differentiate", counting)
        output.sum().backward()
    return " ".join(group.events), kept


def test_gradients_that_crossed_a_cut_are_reduced_in_the_order_of_their_use(gloo_pools: GlooPools) -> None:
    """Those of inputs 5 and 4. Sub-block 3 needs neither of them, sub-block 2 that of 5, and the range before both."""
    for events, _ in gloo_pools(2).run(middle_range_events, small_model(num_layers=3, **STALENESS_2)):
        assert events == "L0 L1 W0 W1"


def test_own_partials_keep_only_gradients_that_an_output_still_needs(gloo_pools: GlooPools) -> None:
    """Input 5 misses output 3, which goes backward first; inputs 4 and 3 miss output 2."""
    config = small_model(num_layers=3, lanes=2, **STALENESS_2)
    for found in gloo_pools(2).run(middle_range_events, config):
        assert found == ("L0 L1 W0 W1", [2, 0])


class RecordingQueue(InlineQueue):
    """A side queue that records chains with their number of inputs (`R2`) and joins (`J`), and holds the inputs."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.held: list[Any] = []
        self.running = False

    def run(self, chain: Callable[[], Any], uses: Any) -> Any:
        if uses is not None:
            self.events.append(f"R{len(uses)}")
            self.held.append(uses)
        self.running = True
        result = chain()
        self.running = False
        return result

    def join(self) -> None:
        self.events.append("J")
        self.held.clear()


def side_queue_events(config: ModelConfig, recompute: int, training: bool) -> tuple[str, int, list[bool]]:
    """Run a forward and, with `training`, a backward pass over a sharded stream with a side queue.

    Return chains, joins and starts of bodies (`B3`), how much the queue holds at the end, and for each norm that
    autograd follows, whether a chain of the queue computed it.
    """
    model, _ = recorded_model(config, StackOptions(recompute_layers=recompute), sequence_parallel=True)
    model.stack.side_queue = queue = RecordingQueue()
    in_queue: list[bool] = []
    for number, step in enumerate(model.stack.sub_blocks()):
        assert isinstance(step.body, nn.Module)
        step.body.register_forward_pre_hook(lambda *_, number=number: queue.events.append(f"B{number}"))
        step.norm.register_forward_hook(lambda *_: in_queue.append(queue.running) if torch.is_grad_enabled() else None)
    with torch.set_grad_enabled(training):
        state = torch.randn(1, 6, 2, config.hidden_size, requires_grad=training)
        output, _ = model.stack(state, model.training_context(torch.arange(24).view(2, 12)))
        if training:
            output.sum().backward()
    return " ".join(queue.events), len(queue.held), in_queue


@pytest.mark.parametrize("training", [True, False])
def test_results_of_the_side_queue_are_joined_before_their_use(gloo_pools: GlooPools, training: bool) -> None:
    """A chain uses the stream, and the outputs (or reads) that are in flight."""
    config = small_model(num_layers=3, **LADDER_PARALLEL)
    expected = "R1 B0 J R2 B1 J B2" + " R1 J R2 J" * training
    for events, *_ in gloo_pools(2).run(side_queue_events, config, 0, training):
        assert events == expected


@pytest.mark.parametrize("wiring", [{}, PARALLEL, LADDER, HYBRID], ids=["standard", "parallel", "ladder", "hybrid"])
def test_a_step_leaves_nothing_in_the_side_queue(gloo_pools: GlooPools, wiring: dict[str, Any]) -> None:
    """It would hold the inputs of recomputed sub-blocks on the GPU for ever.

    CUDA runs the backward of a norm on the stream of its forward; on the compute stream it would not overlap.
    """
    for _, held, in_queue in gloo_pools(2).run(side_queue_events, small_model(num_layers=3, **wiring), 3, True):
        assert held == 0
        assert all(in_queue) and len(in_queue) == (3 if wiring is PARALLEL else 6)
