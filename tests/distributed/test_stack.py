"""The order of launches, waits and computations in the stack, and ranges of layers that are chained."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ladder.blueprint.model import ModelConfig
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
PASSES = ((True, 0), (True, 3), (False, 0), (False, 3))
"""Whether autograd follows a pass, and how many layers are recomputed: the order must not depend on them."""


def check_orders(gloo_pools: GlooPools, events: Callable[..., str], wiring: str, expected: str, *more: Any) -> None:
    config = small_model(num_layers=3, **WIRINGS[wiring])
    for training, recompute in PASSES:
        options = StackOptions(recompute_layers=recompute)
        assert gloo_pools(2).run(events, config, options, training, *more) == [expected, expected]


def forward_events(config: ModelConfig, options: StackOptions, training: bool, sharded: bool = False) -> str:
    """Return the launches, waits and computations (`B3`: sub-block 3 starts) of the stack's forward pass."""
    model, group = recorded_model(config, options, sequence_parallel=sharded)
    model.stack.side_queue = InlineQueue() if sharded else None
    for number, step in enumerate(model.stack.sub_blocks()):
        assert isinstance(step.body, nn.Module)
        step.body.register_forward_pre_hook(lambda *_, number=number: group.events.append(f"B{number}"))
    tokens = torch.arange(24).view(2, 12)
    with torch.set_grad_enabled(training):
        state = torch.randn(1, 6 if sharded else 12, 2, config.hidden_size, requires_grad=training)
        model.stack(state, model.training_context(tokens))
    return " ".join(group.events)


@pytest.mark.parametrize(
    ("wiring", "expected"),
    [
        ("standard", "B0 L0 W0 B1 L1 W1 B2 L2 W2 B3 L3 W3 B4 L4 W4 B5 L5 W5"),
        ("ladder", "B0 L0 B1 L1 W0 B2 L2 W1 B3 L3 W2 B4 L4 W3 B5 L5 W4 W5"),
        ("hybrid", "B0 L0 W0 B1 L1 B2 L2 W1 B3 L3 W2 W3 B4 L4 W4 B5 L5 W5"),
        ("parallel", "B0 L0 W0 B1 L1 W1 B2 L2 W2"),
        ("ladder-parallel", "B0 L0 B1 L1 W0 B2 L2 W1 W2"),
        ("staleness-2", "B0 L0 B1 L1 B2 L2 W0 B3 L3 W1 B4 L4 W2 B5 L5 W3 W4 W5"),
        ("ladder-attention", "B0 L0 W0 B1 L1 B2 L2 W1 W2 B3 L3 B4 L4 W3 W4 B5 L5 W5"),
        ("desync-2", "B0 B1 L0 W0 B2 B3 L1 W1 B4 B5 L2 W2"),
        ("desync-4", "B0 B1 B2 B3 L0 W0 B4 B5 L1 W1"),
        ("lanes", "B0 L0 B1 L1 B2 L2 W0 B3 L3 W1 B4 L4 W2 B5 L5 W3 W4 W5"),
        ("farskip-without-shared", "B0 L0 B1 L1 W0 B2 L2 W1 B3 L3 W2 B4 L4 W3 B5 L5 W4 W5"),
        # Attention, shared, routed; attention, MLP; attention, shared, routed. Attention travels with what follows it.
        ("farskip", "B0 B1 L0 B2 L1 W0 B3 W1 B4 L2 W2 B5 B6 L3 B7 L4 W3 W4"),
        # Attention, routed, shared; attention, MLP; attention, routed, shared.
        ("shortcut", "B0 L0 B1 L1 W0 B2 L2 W1 W2 B3 L3 W3 B4 L4 W4 B5 L5 B6 L6 W5 B7 L7 W6 W7"),
        # Attention, routed, MLP, attention, MLP; the other layers without routed.
        (
            "longcat",
            "B0 L0 W0 B1 L1 B2 L2 W2 B3 L3 W3 B4 L4 W1 W4 "
            + " ".join(f"B{number} L{number} W{number}" for number in range(5, 13)),
        ),
    ],
)
def test_forward_keeps_reduces_in_flight(gloo_pools: GlooPools, wiring: str, expected: str) -> None:
    check_orders(gloo_pools, forward_events, wiring, expected)


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
    check_orders(gloo_pools, forward_events, wiring, expected, True)


def backward_events(config: ModelConfig, options: StackOptions) -> str:
    """Return launches and waits of the reduces of input gradients, numbered by sub-block, and recomputations (`B3`)."""
    model, group = recorded_model(config, options)
    steps = model.stack.sub_blocks()
    tokens = torch.arange(24).view(2, 12)
    state = torch.randn(1, 12, 2, config.hidden_size, requires_grad=True)
    output = model.stack(state, model.training_context(tokens))
    last = group.started + len(steps) - 1
    for number, step in enumerate(steps):
        step.norm.register_forward_pre_hook(lambda *_, number=number: group.events.append(f"B{number}"))
    group.events.clear()
    output.sum().backward()
    partial_gradients = int(config.qk_layernorm or config.lanes > 0 or config.num_experts > 0)
    assert group.blocking == partial_gradients, "a reduce was waited for at once"
    return " ".join(e if e[0] == "B" else f"{e[0]}{last - int(e[1:])}" for e in group.events)


LADDER_BACKWARD = "L5 L4 W5 L3 W4 L2 W3 L1 W2 L0 W1 W0"
RECOMPUTED_BACKWARD = "B5 L5 B4 L4 B3 W5 L3 B2 W4 L2 B1 W3 L1 B0 W2 L0 W1 W0"


@pytest.mark.parametrize(
    ("wiring", "recompute", "expected"),
    [
        ("ladder", 0, LADDER_BACKWARD),
        ("ladder", 3, RECOMPUTED_BACKWARD),
        ("ladder-qk-norm", 0, LADDER_BACKWARD),
        ("hybrid", 0, "L5 W5 L4 W4 L3 L2 W3 L1 W2 W1 L0 W0"),
        ("standard", 0, "L5 W5 L4 W4 L3 W3 L2 W2 L1 W1 L0 W0"),
        ("parallel", 0, "L2 W2 L1 W1 L0 W0"),
        ("ladder-parallel", 0, "L2 L1 W2 L0 W1 W0"),
        ("staleness-2", 0, "L5 L4 L3 W5 L2 W4 L1 W3 L0 W2 W1 W0"),
        ("ladder-attention", 0, "L5 W5 L4 L3 W4 W3 L2 L1 W2 W1 L0 W0"),
        ("lanes", 0, "L5 L4 L3 W5 L2 W4 L1 W3 L0 W2 W1 W0"),
        ("ladder-lanes", 3, RECOMPUTED_BACKWARD),
        # The shared and the routed experts of a layer share a reading and its reduce, so two numbers are not used.
        ("farskip", 0, "L7 L6 W7 W6 L5 L4 W5 W4 L3 L2 W3 W2"),
        ("shortcut", 0, "L7 L6 W7 L5 W6 W5 L4 W4 L3 W3 L2 L1 W2 L0 W1 W0"),
    ],
)
def test_backward_mirrors_the_forward_order(gloo_pools: GlooPools, wiring: str, recompute: int, expected: str) -> None:
    config = small_model(num_layers=3, **WIRINGS[wiring])
    options = StackOptions(recompute_layers=recompute)
    assert gloo_pools(2).run(backward_events, config, options) == [expected, expected]


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
        output = model.stack(state, model.training_context(torch.arange(24).view(2, 12)))
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


def sharded_backward_events(config: ModelConfig, options: StackOptions) -> str:
    """Return reduces (`L3`, `W3`), gathers of output gradients (`G3`, `H3`) and of inputs (`X3`, `Y3`), numbered by
    sub-block."""
    model, group = recorded_model(config, options, sequence_parallel=True)
    model.stack.side_queue = InlineQueue()
    state = torch.randn(1, 6, 2, config.hidden_size, requires_grad=True)
    output = model.stack(state, model.training_context(torch.arange(24).view(2, 12)))
    reduces, gathers = group.started, group.gathers
    group.events.clear()
    output.sum().backward()
    assert group.blocking == 1, "the norms' gradients need one reduce"
    last = len(model.stack.sub_blocks()) - 1

    def named(event: str) -> str:
        kind, number = event[0], int(event[1:])
        if kind in "LW":
            return f"{kind}{last - (number - reduces)}"
        # The input of a sub-block is gathered before its gradient.
        index, is_gradient = divmod(number - gathers, 2)
        return f"{kind if is_gradient else {'G': 'X', 'H': 'Y'}[kind]}{last - index}"

    return " ".join(named(event) for event in group.events)


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
    config = small_model(num_layers=3, **WIRINGS[wiring])
    options = StackOptions(recompute_layers=recompute)
    assert gloo_pools(2).run(sharded_backward_events, config, options) == [expected, expected]


def weight_gradient_events(config: ModelConfig) -> list[str]:
    """Return launches and waits of the reduces of input gradients, and the arrivals of weight gradients (`G3`)."""
    model, group = recorded_model(config, StackOptions())
    for number, step in enumerate(model.stack.sub_blocks()):
        assert isinstance(step.body, nn.Module)
        names = ("qkv_proj.weight", "gate_up_proj.weight")
        weight = next(parameter for name, parameter in step.body.named_parameters() if name in names)
        weight.register_post_accumulate_grad_hook(lambda _, number=number: group.events.append(f"G{number}"))
    tokens = torch.arange(24).view(2, 12)
    state = torch.randn(1, 12, 2, config.hidden_size, requires_grad=True)
    output = model.stack(state, model.training_context(tokens))
    group.events.clear()
    output.sum().backward()
    return group.events


def test_standard_overlaps_the_reduce_with_the_weight_gradient(gloo_pools: GlooPools) -> None:
    """Megatron's overlap, the baseline for ladder."""
    expected = "L4 G3 W4 L5 G2 W5 L6 G1 W6 L7 G0 W7".split()
    assert gloo_pools(2).run(weight_gradient_events, small_model(num_layers=2)) == [expected, expected]


def test_no_overlap_waits_at_once(gloo_pools: GlooPools) -> None:
    config = small_model(num_layers=3, **LADDER)
    expected = " ".join(f"B{i} L{i} W{i}" for i in range(6))
    assert gloo_pools(2).run(forward_events, config, StackOptions(tp_overlap=False), True) == [expected, expected]


def collectives_and_computations(config: ModelConfig, options: StackOptions) -> tuple[int, int]:
    """Return the number of collectives and of computed sub-blocks in a forward and backward pass."""
    model, group = recorded_model(config, options)
    computed: list[int] = []
    for step in model.stack.sub_blocks():
        step.norm.register_forward_pre_hook(lambda *_: computed.append(1))
    tokens = torch.arange(24).view(2, 12)
    model(tokens, tokens).backward()
    return group.started + group.blocking, len(computed)


@pytest.mark.parametrize("overlap", [True, False])
def test_recomputation_repeats_sub_blocks_but_no_collective(gloo_pools: GlooPools, overlap: bool) -> None:
    config = small_model(num_layers=3, **LADDER)
    found = [
        gloo_pools(2).run(collectives_and_computations, config, StackOptions(overlap, recomputed))[0]
        for recomputed in (0, 2, 3)
    ]
    assert [computed for _, computed in found] == [6, 6 + 4, 6 + 6]
    assert len({collectives for collectives, _ in found}) == 1


def desync_reduces(config: ModelConfig, options: StackOptions) -> tuple[int, int]:
    """Return the number of reduces in the stack's forward and backward pass."""
    model, group = recorded_model(config, options)
    state = torch.randn(1, 12, 2, config.hidden_size, requires_grad=True)
    output = model.stack(state, model.training_context(torch.arange(24).view(2, 12)))
    forward = group.started + group.blocking
    output.sum().backward()
    return forward, group.started + group.blocking - forward


@pytest.mark.parametrize("recompute", [0, 4])
@pytest.mark.parametrize(("wiring", "intervals"), [(DESYNC_2, 5), (DESYNC_4, 3)])
def test_desync_reduces_once_per_interval(
    gloo_pools: GlooPools, wiring: dict[str, Any], intervals: int, recompute: int
) -> None:
    """In backward, the gradients of the stream and of the norm that reads it share one reduce."""
    config = small_model(num_layers=5, **wiring)
    options = StackOptions(recompute_layers=recompute)
    assert gloo_pools(2).run(desync_reduces, config, options) == [(intervals, intervals)] * 2
