"""Experts that are divided over expert-parallel ranks, compared with one process that has all experts and samples."""

import functools
import gc
import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ladder_lab.cost.divided_experts import Schedule, forward_events
from ladder_lab.cost.links import SubBlockTime
from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.blueprint.tensors import layer_tensors
from megatron_ladder.blueprint.wiring import WIRINGS as WIRINGS_BY_NAME
from megatron_ladder.blueprint.wiring import SubBlockKind
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import ExpertOptions
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.model.stats import PassStats
from megatron_ladder.model.sub_block import Body
from megatron_ladder.parallel.layout import ParallelModule, parameter_sections
from tests.distributed.test_correctness import (
    CUTS,
    GLM,
    PER_SEQUENCE,
    QWEN,
    RECOMPUTED,
    SHARED,
    SHARED_BIASED,
    TOLERANCE,
    WIRINGS,
    Batch,
    late,
    micro_batches,
)
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pairwise import pairwise, usual_share
from tests.helpers.pool import GlooPools
from tests.helpers.recording import InlineQueue, RecordingGroup
from tests.helpers.sharded import Pieces, assert_pieces, fill_slices, gradient_pieces, run_chain, small_model
from tests.reference import ReferenceConfig, Routed, Weights, make_weights, reference_gradients, reference_logits

MODELS: dict[str, dict[str, Any]] = {
    **{name: changes for name, changes in WIRINGS.items() if "num_experts" in changes},
    "parallel-without-shared": {**QWEN, "residual_mode": "parallel"},
    "staleness-2": late("ladder", staleness=2, **SHARED),
    "staleness-2-without-shared": late("ladder", staleness=2, **QWEN),
    "ladder-biased": late("ladder", **WIRINGS["experts-biased"] | SHARED_BIASED),
    "shortcut-unnormalized": late("shortcut", **GLM | {"moe_router_unnormalized": True}),
}

LETTERS = {
    SubBlockKind.MIXER: "A",
    SubBlockKind.MIXER_SHARED: "A",
    SubBlockKind.SECOND_MIXER: "B",
    SubBlockKind.MLP: "M",
    SubBlockKind.SECOND_MLP: "N",
    SubBlockKind.SHARED_EXPERT: "S",
    SubBlockKind.ROUTED_EXPERTS: "R",
    SubBlockKind.PARALLEL_ROUTED_EXPERTS: "R",
}


class Layout(NamedTuple):
    """Ranks of a stage; data-parallel ranks are the rest."""

    ranks: int
    tensor: int
    experts: int
    queue: bool = False
    """Whether inputs are prepared ahead, as on a second stream of CUDA."""
    stages: int = 1

    @property
    def data(self) -> int:
        """Number of data-parallel ranks."""
        return self.ranks // self.tensor


LAYOUTS = {
    "ep2": Layout(2, 1, 2),
    "ep2-dp2-ahead": Layout(4, 1, 2, queue=True),
    "ep4": Layout(4, 1, 4),
    "ep2-tp2": Layout(2, 2, 2),
    "ep2-tp2-dp2": Layout(4, 2, 2),
    "ep4-tp2-ahead": Layout(4, 2, 4, queue=True),
    "ep2-tp4": Layout(4, 4, 2),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "overlap": ("overlap", PER_SEQUENCE),
    "forward-overlap": ("forward-overlap", PER_SEQUENCE | {"moe_router_load_balancing_type": "aux_loss"}),
    "blocking": ("blocking", {}),
}
UNUSED: dict[str, tuple[int, ...]] = {"all": (), "unused-expert": (5,), "unused-ranks": (0, 1, 2, 3)}
"""Experts that no token chooses."""
CAPACITIES = {"needed-rows": None, "32-rows": 32}
"""Rows of an expert; a rank has at most 32 tokens."""


class How(NamedTuple):
    """What must not change the result."""

    layout: Layout
    overlap: str
    recompute: int
    cuts: tuple[int, ...]
    micro_batches: int
    capacity: int | None = None
    """Rows of an expert."""

    @property
    def options(self) -> StackOptions:
        """The options of the stack."""
        return StackOptions(
            self.overlap != "blocking", self.recompute, mirrored_backward=self.overlap != "forward-overlap"
        )


class Outcome(NamedTuple):
    """Sums over the data-parallel ranks."""

    loss: float
    loads: list[list[float]]
    gradients: Pieces


@functools.cache
def _expert_mesh(tensor: int, experts: int, replicas: tuple[int, ...], stages: int) -> ProcessMesh:
    options = {"sequence_parallel": tensor > 1, "expert_parallel": experts}
    return ProcessMesh.build(tensor, stages, replicas, **options)


def expert_mesh(config: ModelConfig, tensor: int, experts: int, stages: int = 1) -> ProcessMesh:
    return _expert_mesh(tensor, experts, head_replicas(config, tensor), stages)


def build_parts(config: ModelConfig, weights: Weights, experts: ExpertOptions, how: How) -> list[LanguageModel]:
    """Return this rank's ranges of layers, in the dtype of the weights."""
    dtype = weights["embedding.weight"].dtype
    layout = how.layout
    experts = replace(experts, capacity=how.capacity)
    mesh = expert_mesh(config, layout.tensor, layout.experts)
    parts = []
    for bound in itertools.pairwise((0, *how.cuts, config.num_layers)):
        part = LanguageModel(config, mesh, how.options, chunks=[range(*bound)], dtype=dtype, experts=experts)
        fill_slices(part, weights)
        part.stack.side_queue = InlineQueue() if layout.queue else None
        parts.append(part)
    return parts


def summed_gradients(model: LanguageModel) -> Pieces:
    """Return the gradients of weights that train, summed over the ranks that hold the same slices."""
    for module in model.modules():
        if isinstance(module, ParallelModule):
            for parameter in module.parameters(recurse=False):
                if parameter.grad is not None:
                    module.data.all_reduce(parameter.grad)
    return gradient_pieces(model)


def freeze(model: LanguageModel, frozen: str) -> None:
    """Freeze the tensors whose names match."""
    for parameter, sections in parameter_sections(model):
        parameter.requires_grad_(not any(re.search(frozen, section.name) for section in sections))


def part_of_rank(batch: Batch, data: CommGroup) -> Batch:
    """Return this data-parallel rank's rows."""
    return Batch(*(rows.chunk(data.size)[data.rank] for rows in batch))


def run_case(
    config: ModelConfig, weights: Weights, experts: ExpertOptions, how: How, batch: Batch, frozen: str
) -> Outcome:
    """Run this rank's micro-batches through one or several ranges of layers; freeze tensors whose names match."""
    parts = build_parts(config, weights, experts, how)
    for part in parts:
        freeze(part, frozen)
    data = parts[0].stack.mesh.data
    own = part_of_rank(batch, data)
    loss_sum, sums = torch.zeros(1, dtype=torch.float64), PassStats()
    all_tokens = int(batch.lengths.sum())
    for tokens, labels, mask, lengths in micro_batches(own, how.micro_batches):
        loss, stats = run_chain(parts, tokens, labels, mask, batch.targets, lengths, all_tokens)
        loss_sum += loss.detach()
        sums = sums.plus(stats)
    loss_sum += sum(float(loss) for loss in sums.losses.values()) / all_tokens
    loads = [data.all_reduce(loads).tolist() for loads in sums.loads.values()]
    return Outcome(
        data.all_reduce(loss_sum).item(), loads, [piece for part in parts for piece in summed_gradients(part)]
    )


def make_batch(config: ModelConfig, rows: int = 8, length: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (rows, length + 1), generator=generator)
    mask = (torch.rand(rows, length, generator=generator) < 0.6).double()
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, lengths)


def weights_without(config: ReferenceConfig, unused: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return weights with which no token chooses some of the experts."""
    weights = make_weights(config, seed=1, dtype=dtype)
    for name, bias in weights.items():
        if name.endswith("expert_bias"):
            bias[list(unused)] = -100.0
    return weights


def check(
    gloo_pools: GlooPools,
    config: ModelConfig,
    how: How,
    batch: Batch,
    unused: tuple[int, ...],
    frozen: str = "^$",
    run: Callable[..., Outcome] = run_case,
    **losses: Any,
) -> None:
    config = replace(config, moe_router_enable_expert_bias=True)
    reference = replace(ReferenceConfig.like(config), **losses)
    weights = weights_without(reference, unused, torch.float64)
    expected_loss, expected = 0.0, dict[str, Tensor]()
    is_whole = reference.moe_router_load_balancing_type == "seq_aux_loss"
    for part in micro_batches(batch, 1 if is_whole else how.micro_batches * how.layout.data):
        totals = batch.targets, int(batch.lengths.sum())
        loss, gradients = reference_gradients(weights, reference, *part[:3], *totals, part.sight)
        expected_loss += loss.item()
        expected = {name: expected[name] + one if expected else one for name, one in gradients.items()}
    record: list[Routed] = []
    reference_logits(weights, reference, batch.tokens, batch.sight, record)
    experts = ExpertOptions(
        reference.moe_aux_loss_coeff, reference.moe_router_load_balancing_type, reference.moe_z_loss_coeff
    )
    expected = {name: gradient for name, gradient in expected.items() if not re.search(frozen, name)}
    ranks = how.layout.ranks * how.layout.stages
    outcomes = gloo_pools(ranks).run(run, config, weights, experts, how, batch, frozen)
    for loss, loads, _ in outcomes:
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert loads == [routed.loads.tolist() for routed in record]
    for routed in record:
        assert not any(routed.loads[list(unused)])
    assert_pieces([outcome.gradients for outcome in outcomes], expected, TOLERANCE)


@pytest.mark.parametrize(
    ("model", "layout", "recompute", "cuts", "micro_batches", "variant", "unused", "capacity"),
    pairwise(list(MODELS), LAYOUTS, RECOMPUTED, CUTS, {"one": 1, "accumulated": 2}, list(VARIANTS), UNUSED, CAPACITIES),
)
def test_every_wiring_and_layout(
    gloo_pools: GlooPools,
    model: str,
    layout: Layout,
    recompute: int,
    cuts: tuple[int, ...],
    micro_batches: int,
    variant: str,
    unused: tuple[int, ...],
    capacity: int | None,
) -> None:
    overlap, losses = VARIANTS[variant]
    config = small_model(**MODELS[model])
    how = How(layout, overlap, recompute, cuts, micro_batches, capacity)
    check(gloo_pools, config, how, make_batch(config), unused, **losses)


def routed_model(model: str, layers: int = 2, **changes: Any) -> ModelConfig:
    """Return a wiring with experts in every layer: `ladder`, `ladder 2` with staleness 2, or `ladder-routed` without a
    shared expert."""
    residual_mode, _, staleness = model.removesuffix("-routed").partition(" ")
    has_shared = residual_mode != "longcat" and not model.endswith("-routed")
    fields: dict[str, Any] = {
        "num_experts": 4,
        "moe_ffn_hidden_size": 8,
        "moe_layers": range(layers),
        "moe_shared_expert_intermediate_size": 8 if has_shared else 0,
        "num_layers": layers,
        "residual_mode": residual_mode,
        "ladder_layers": range(layers) if WIRINGS_BY_NAME[residual_mode].late else (),
        "residual_staleness": int(staleness or 1),
    }
    return small_model(**fields | changes)


def record_middle(body: Body, name: str, events: list[str]) -> None:
    if body.middle is None:
        return
    cross = body.middle.cross

    def record(inner: Tensor) -> Tensor:
        if inner.requires_grad:
            inner.register_hook(lambda _: events.append(name))
        crossed = cross(inner)
        events.append(name)
        return crossed

    body.middle.cross = record  # type: ignore[method-assign]


def events(
    config: ModelConfig,
    tensor: int,
    recompute: int,
    training: bool,
    overlap: bool = True,
    capacity: int | None = None,
) -> tuple[str, str]:
    """Return the events of a forward pass and, with `training`, of its backward pass.

    They are launches and waits of dispatches (`D3`, `d3`) and combines (`C3`, `c3`), and the numbers of rows ahead of
    them (`K3`, `k3`), starts of bodies (`A3`, `S3`, `M3`, `R3`) and of their output projections (`a3`), by layer.
    Backward, `C3` is the gradient of a combine and `D3` that of a dispatch, `a3` is where the output projection has
    gone backward, and `A3` where the gradients of the weights are complete.
    """
    mesh = expert_mesh(config, tensor, 2)
    group = RecordingGroup(mesh.experts)
    group.width = config.hidden_size
    options, experts = StackOptions(overlap, recompute), ExpertOptions(capacity=capacity)
    model = LanguageModel(config, replace(mesh, experts=group), options, seed=1, experts=experts)
    steps = model.stack.sub_blocks()
    layers = [int(step.name.split(".")[1]) for step in steps]
    hooks = []
    for step, layer in zip(steps, layers, strict=True):
        name = f"{LETTERS[step.wired.kind]}{layer}"
        hooks.append(step.body.register_forward_pre_hook(lambda *_, name=name: group.events.append(name)))
        record_middle(step.body, name.lower(), group.events)
    with torch.set_grad_enabled(training):
        state = torch.randn(1, 12 // tensor, 2, config.hidden_size, requires_grad=training)
        context = model.training_context(torch.arange(24).view(2, 12))._replace(counts=training)
        output, _ = model.stack(state, context)
    forward = " ".join(group.events)
    group.events.clear()
    if not training:
        return forward, ""
    for step, layer, hook in zip(steps, layers, hooks, strict=True):
        hook.remove()
        first = next(weight for name, weight in step.body.named_parameters() if "router" not in name)
        name = f"{LETTERS[step.wired.kind]}{layer}"
        first.register_post_accumulate_grad_hook(
            lambda weight, name=name: group.events.extend([] if weight.grad is None else [name])
        )
    sent = Counter(group.exchanges)
    output.sum().backward()

    def mirrored(event: str) -> str:
        kind, number = event[0], int(event[1:])
        if kind.upper() not in "CDK":
            return event
        layer = len(config.moe_layers) - 1 - (number - sent[kind.upper()])
        return f"{kind}{config.moe_layers[layer]}"

    return forward, " ".join(map(mirrored, group.events))


def planned_events(config: ModelConfig) -> str:
    """Return the events of a forward pass in the step-time model, named as those of `events`."""
    wired = [
        (layer, sub_block.wired) for layer, of_layer in enumerate(layer_tensors(config, True)) for sub_block in of_layer
    ]
    blocks = [
        SubBlockTime(1.0, one.moves_tokens, one.missing, read_seconds=one.moves_tokens, moves_tokens=one.moves_tokens)
        for _, one in wired
    ]
    names = []
    for action, what, position in forward_events(blocks, Schedule()):
        layer, one = wired[position]
        body = f"{LETTERS[one.kind]}{layer}"
        if what == "work":
            names.append(body)
        elif what == "projection" and not one.moves_tokens:
            names.append(body.lower())
        elif one.moves_tokens and what != "projection":
            kind = "D" if what == "input" else "C"
            names.append(f"{kind if action == 'launch' else kind.lower()}{layer}")
    return " ".join(names)


@pytest.mark.parametrize(
    ("model", "forward", "backward"),
    [
        # Both ways of the tokens are under the shared expert.
        (
            "standard",
            "A0 a0 D0 S0 d0 R0 C0 s0 c0 A1 a1 D1 S1 d1 R1 C1 s1 c1",
            "C1 s1 c1 D1 R1 S1 d1 a1 C0 s0 A1 c0 D0 R0 S0 d0 a0 A0",
        ),
        (
            "standard-routed",
            "A0 a0 D0 d0 R0 C0 c0 A1 a1 D1 d1 R1 C1 c1",
            "C1 c1 D1 R1 d1 a1 C0 A1 c0 D0 R0 d0 a0 A0",
        ),
        ("parallel", "D0 A0 d0 R0 C0 a0 c0 D1 A1 d1 R1 C1 a1 c1", "C1 a1 c1 D1 R1 A1 d1 C0 a0 c0 D0 R0 A0 d0"),
        # The tokens of layer 1 leave in the middle of its attention.
        (
            "ladder",
            "D0 A0 a0 S0 s0 d0 R0 C0 A1 c0 D1 a1 S1 d1 R1 C1 s1 c1",
            "C1 s1 c1 D1 R1 S1 d1 C0 a1 A1 c0 D0 R0 s0 S0 a0 A0 d0",
        ),
        (
            "ladder-routed",
            "D0 A0 a0 d0 R0 C0 A1 c0 D1 a1 d1 R1 C1 c1",
            "C1 c1 D1 R1 a1 d1 C0 A1 c0 D0 R0 a0 A0 d0",
        ),
        # They travel under the experts of layer 0.
        (
            "ladder 2",
            "D0 A0 a0 D1 S0 s0 d0 R0 C0 A1 a1 S1 d1 R1 C1 s1 c0 c1",
            "C1 C0 s1 c1 D1 R1 S1 a1 A1 c0 D0 R0 s0 S0 d1 a0 A0 d0",
        ),
        ("ladder-parallel", "D0 A0 D1 a0 d0 R0 C0 A1 d1 R1 C1 a1 c0 c1", "C1 C0 a1 c1 D1 R1 A1 c0 D0 R0 a0 A0 d1 d0"),
        (
            "farskip",
            "D0 A0 a0 S0 s0 d0 R0 C0 A1 c0 D1 a1 S1 d1 R1 C1 s1 c1",
            "C1 s1 c1 D1 R1 S1 d1 C0 a1 A1 c0 D0 R0 s0 S0 a0 A0 d0",
        ),
        (
            "shortcut",
            "D0 A0 a0 d0 R0 C0 S0 s0 c0 D1 A1 a1 d1 R1 C1 S1 s1 c1",
            "C1 s1 S1 c1 D1 R1 a1 A1 d1 C0 s0 S0 c0 D0 R0 a0 A0 d0",
        ),
        (
            "longcat",
            "A0 a0 D0 M0 m0 d0 R0 C0 B0 b0 N0 n0 c0 A1 a1 D1 M1 m1 d1 R1 C1 B1 b1 N1 n1 c1",
            "C1 n1 N1 b1 B1 c1 D1 R1 m1 M1 d1 a1 C0 n0 N0 A1 b0 B0 c0 D0 R0 m0 M0 d0 a0 A0",
        ),
    ],
)
def test_tokens_travel_under_other_sub_blocks(gloo_pools: GlooPools, model: str, forward: str, backward: str) -> None:
    """Forward, the numbers of rows go ahead of them, and nowhere else."""
    config = routed_model(model)
    assert planned_events(config) == forward
    for training in (True, False):
        for found, mirrored in gloo_pools(2).run(events, config, 1, 0, training):
            assert found == re.sub(r"D(\d)", r"K\1 k\1 D\1", forward)
            assert mirrored == (backward if training else "")


def test_with_a_capacity_rows_travel_before_their_numbers_are_waited_for(gloo_pools: GlooPools) -> None:
    """An evaluation waits for the numbers, because it cannot be repeated with a larger capacity."""
    config = routed_model("ladder-routed")
    for training, expected in (
        (True, "K0 D0 A0 a0 d0 k0 R0 C0 A1 c0 K1 D1 a1 d1 k1 R1 C1 c1"),
        (False, "K0 k0 D0 A0 a0 d0 R0 C0 A1 c0 K1 k1 D1 a1 d1 R1 C1 c1"),
    ):
        for forward, backward in gloo_pools(2).run(events, config, 1, 0, training, True, 24):
            assert forward == expected
            assert backward == ("C1 c1 D1 R1 a1 d1 C0 A1 c0 D0 R0 a0 A0 d0" if training else "")


def test_recomputation_sends_tokens_again_under_other_sub_blocks(gloo_pools: GlooPools) -> None:
    """The numbers of rows are kept. Each layer dispatches again, combines, and dispatches, numbered from 3 to 0."""
    config = routed_model("ladder-routed")
    for _, backward in gloo_pools(2).run(events, config, 1, 2, True):
        assert backward == "D1 C1 d1 c1 D0 R1 a1 D1 a1 d0 C0 A1 d1 c0 D0 R0 a0 a0 A0 d0"


def test_no_overlap_waits_at_once(gloo_pools: GlooPools) -> None:
    config = routed_model("ladder")
    for training in (True, False):
        for forward, backward in gloo_pools(2).run(events, config, 1, 0, training, False):
            assert forward == " ".join(f"A{i} a{i} S{i} s{i} K{i} k{i} D{i} d{i} R{i} C{i} c{i}" for i in (0, 1))
            expected = " ".join(f"C{i} c{i} R{i} D{i} d{i} s{i} S{i} a{i} A{i}" for i in (1, 0))
            assert backward == (expected if training else "")


def sent_tokens(config: ModelConfig) -> int:
    """Return how many tensors of tokens with the weights of their choices are left after a forward pass."""
    model = LanguageModel(config, expert_mesh(config, 1, 2), StackOptions(), seed=1)
    state = torch.randn(1, 12, 2, config.hidden_size, requires_grad=True)
    output, _ = model.stack(state, model.training_context(torch.arange(24).view(2, 12)))
    gc.collect()
    shape = (12, 2, config.hidden_size + config.moe_router_topk)
    left = sum(isinstance(each, Tensor) and each.shape == shape for each in gc.get_objects())
    output.sum().backward()
    return left


def test_backward_keeps_the_rows_that_arrive_and_not_those_sent(gloo_pools: GlooPools) -> None:
    config = routed_model("ladder-routed")
    assert gloo_pools(2).run(sent_tokens, config) == [0, 0]


class Kept(NamedTuple):
    """What is alive on a rank after a forward pass."""

    bytes: int
    rows: int
    """Rows that have arrived in all layers, without padding."""


def kept_by_forward(config: ModelConfig, popular: tuple[int, ...], capacity: int | None) -> Kept:
    """Run a forward pass of 64 tokens on each rank, all of which choose among the popular experts."""
    mesh = expert_mesh(config, 1, 2)
    model = LanguageModel(config, mesh, StackOptions(), seed=1, experts=ExpertOptions(capacity=capacity))
    for router in model.routers:
        assert router.expert_bias is not None
        router.expert_bias[list(popular)] = 100.0
    tokens = torch.arange(64).view(2, 32)
    state = torch.randn(1, 32, 2, config.hidden_size, generator=torch.Generator().manual_seed(mesh.data.rank))
    context = model.training_context(tokens)._replace(counts=True)
    with LiveBytes() as memory:
        _output, stats = model.stack(state.requires_grad_(), context)
        gc.collect()
    loads = mesh.data.all_reduce(torch.stack([*stats.loads.values()]))
    return Kept(memory.live, int(loads.chunk(2, dim=1)[mesh.experts.rank].sum()))


@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_memory_follows_from_the_rows_that_arrive(gloo_pools: GlooPools, wiring: str) -> None:
    """A row keeps its input, its weight, and its products with gate and up, whichever rank it comes from."""
    changes = {"moe_ffn_hidden_size": 64, "hidden_size": 128, "moe_router_enable_expert_bias": True}
    config = routed_model(f"{wiring}-routed", **changes)
    bytes_of_row = 4 * (128 + 1 + 2 * 64)
    everywhere, first, last = (0, 1, 2, 3), (0, 1), (2, 3)
    balanced = gloo_pools(2).run(kept_by_forward, config, everywhere, None)
    assert sum(kept.rows for kept in balanced) == 2 * 2 * 64 * 2 and all(kept.rows > 0 for kept in balanced)
    for popular, empty in ((first, 1), (last, 0)):
        uneven = gloo_pools(2).run(kept_by_forward, config, popular, None)
        assert uneven[empty].rows == 0
        for more, less in zip(uneven, balanced, strict=True):
            assert more.bytes - less.bytes == pytest.approx((more.rows - less.rows) * bytes_of_row, rel=0.05)
    for popular in (everywhere, first):
        # Two layers receive 64 rows for each of two experts from each of two ranks.
        padded = gloo_pools(2).run(kept_by_forward, config, popular, 64)
        for more, less in zip(padded, balanced, strict=True):
            assert more.bytes - less.bytes == pytest.approx((2 * 2 * 2 * 64 - less.rows) * bytes_of_row, rel=0.05)


@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(4, 1, 4), Layout(4, 2, 4)], ids=["ep2", "ep4", "ep4-tp2"])
@pytest.mark.parametrize(("recompute", "capacity"), [(0, None), (3, None), (3, 1)])
def test_a_micro_batch_of_one_token(
    gloo_pools: GlooPools, layout: Layout, recompute: int, capacity: int | None
) -> None:
    """Most ranks receive no rows. Attention has nothing to choose, so its queries and keys have no gradient."""
    config = small_model(**WIRINGS["farskip"])
    batch = make_batch(config, rows=layout.data, length=layout.tensor)
    how = How(layout, "overlap", recompute, (1,), 1, capacity)
    check(gloo_pools, config, how, batch, (), "[qkv]_proj", **PER_SEQUENCE)


@pytest.mark.parametrize("kind", ["seq_aux_loss", "aux_loss"])
@pytest.mark.parametrize("layout", [Layout(2, 2, 2), Layout(4, 2, 4)], ids=["ep2-tp2", "ep4-tp2"])
def test_balancing_losses_alone(gloo_pools: GlooPools, layout: Layout, kind: str) -> None:
    """No target counts, so that a loss of parts of sequences is not hidden by the gradient of the rest."""
    config = small_model(**WIRINGS["experts"])
    batch = make_batch(config)
    batch = batch._replace(loss_mask=torch.zeros_like(batch.loss_mask))
    losses = PER_SEQUENCE | {"moe_router_load_balancing_type": kind}
    check(gloo_pools, config, How(layout, "overlap", 2, (), 2), batch, (), **losses)


@pytest.mark.parametrize(
    ("model", "layout", "overlap", "frozen"),
    [
        *pairwise(
            ["farskip", "staleness-2", "experts"],
            {name: LAYOUTS[name] for name in ("ep2", "ep2-tp2")},
            ["overlap", "forward-overlap"],
            {
                "router": r"router",
                "experts": r"\.experts\.",
                "routed": r"\.experts\.|router",
                "below": r"embedding|layers\.[01]\.",
                "all-but-experts": r"^(?!.*\.experts\.)",
                "all-but-routers": r"^(?!.*router)",
            },
        ),
        # The routed experts that run in the middle of the lowest one do not go backward.
        pytest.param("experts", LAYOUTS["ep2"], "overlap", r"^(?!.*shared_expert)", id="all but shared experts"),
    ],
)
def test_frozen_parts(gloo_pools: GlooPools, model: str, layout: Layout, overlap: str, frozen: str) -> None:
    # Each rank has rows of the vocabulary, so that all freeze the same tensors.
    config = small_model(**MODELS[model], vocab_size=257)
    how = How(layout, overlap, 0, (), 1)
    check(gloo_pools, config, how, make_batch(config), (), frozen, **PER_SEQUENCE)
    check(gloo_pools, config, how._replace(recompute=3), make_batch(config), (), frozen, **PER_SEQUENCE)


def evaluated(config: ModelConfig, weights: Weights, how: How, batch: Batch) -> float:
    """Return the loss of an evaluation."""
    (part,) = build_parts(config, weights, ExpertOptions(), how)
    data = part.stack.mesh.data
    own = part_of_rank(batch, data)
    with torch.no_grad():
        loss, _ = part.stage(own.tokens, own.labels, own.loss_mask, lengths=own.lengths)
    return data.all_reduce(loss).item()


def test_evaluation(gloo_pools: GlooPools) -> None:
    config = small_model(**MODELS["staleness-2"])
    reference = ReferenceConfig.like(config)
    weights = make_weights(reference, seed=1, dtype=torch.float64)
    batch = make_batch(config)
    expected, _ = reference_gradients(weights, reference, *batch[:3], 1.0, None, batch.sight)
    for name in ("ep4", "ep4-tp2-ahead"):
        how = How(LAYOUTS[name], "overlap", 3, (), 1)
        for loss in gloo_pools(4).run(evaluated, config, weights, how, batch):
            assert loss == pytest.approx(expected.item(), rel=TOLERANCE)


@pytest.mark.parametrize("unused", UNUSED.values(), ids=UNUSED.keys())
def test_products_of_groups_of_rows(gloo_pools: GlooPools, unused: tuple[int, ...]) -> None:
    """torch has them in fp32, and not in fp64. The rank of an expert decides which rows one product sums."""
    config = replace(small_model(**MODELS["farskip"]), moe_router_enable_expert_bias=True)
    reference = ReferenceConfig.like(config)
    batch = make_batch(config)
    _, expected = reference_gradients(
        weights_without(reference, unused, torch.float64), reference, *batch[:3], batch.targets, None, batch.sight
    )
    weights = weights_without(reference, unused, torch.float32)
    for experts in (2, 4):
        how = How(Layout(4, 1, experts), "overlap", 0, (), 2)
        outcomes = gloo_pools(4).run(run_case, config, weights, ExpertOptions(), how, batch, "^$")
        assert_pieces([outcome.gradients for outcome in outcomes], expected, 1e-5)


class Bits(NamedTuple):
    """What a rank has computed."""

    stream: Tensor
    """After the last layer."""
    loss: Tensor
    least_load: int
    """The smallest number of this rank's tokens that chose an expert of a layer."""
    gradients: Pieces


def bits(config: ModelConfig, weights: Weights, how: How, batch: Batch) -> Bits:
    (model,) = build_parts(config, weights, ExpertOptions(), how)
    data = model.stack.mesh.data
    own = part_of_rank(batch, data)
    streams: list[Tensor] = []
    model.final_norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0].detach().clone()))
    loss, stats = run_chain([model], own.tokens, own.labels, targets=own.tokens.numel())
    least_load = min(int(loads.min()) for loads in stats.loads.values())
    return Bits(streams[0], loss.detach(), least_load, summed_gradients(model))


SHARED_QWEN = QWEN | {"moe_shared_expert_intermediate_size": 20}
ALONE: dict[str, dict[str, Any]] = {
    "farskip": late("farskip", **SHARED_QWEN),
    "standard-routed": QWEN,
    "ladder-routed": late("ladder", **QWEN),
    "ladder-2-routed": late("ladder", staleness=2, **QWEN),
    "ladder-attention-routed": late("ladder-attention", **QWEN),
    "farskip-routed": late("farskip", **QWEN),
    "shortcut": late("shortcut", **SHARED_QWEN),
    "shortcut-routed": late("shortcut", **QWEN),
    "longcat": late("longcat", **QWEN),
}
"""Models whose routed experts are a separate sub-block in any case."""
ADDED: dict[str, dict[str, Any]] = {
    "ladder": late("ladder", **SHARED_QWEN),
    "standard": SHARED_QWEN,
    "ladder-2": late("ladder", staleness=2, **SHARED_QWEN),
    "parallel": {"residual_mode": "parallel", **SHARED_QWEN},
    "ladder-parallel": late("ladder-parallel", **SHARED_QWEN),
}
"""Models in which their output is added to that of another branch before the stream, unless they are divided."""


@pytest.mark.parametrize("model", [*usual_share(ALONE, 5), *usual_share(ADDED, 5)])
def test_who_computes_an_expert_changes_no_bit(gloo_pools: GlooPools, model: str) -> None:
    """Each rank has at least four rows of every expert, because MKL sums products of fewer rows in another order."""
    config = small_model(**(ALONE | ADDED)[model])
    weights = make_weights(ReferenceConfig.like(config), seed=1, dtype=torch.float32)
    batch = make_batch(config, length=48)
    whole, halves, quarters = (
        gloo_pools(4).run(bits, config, weights, How(Layout(4, 1, experts), "overlap", 0, (), 1), batch)
        for experts in (1, 2, 4)
    )
    assert min(rank.least_load for rank in whole) >= 4
    of_experts = {name: values for name, _, values in whole[0].gradients if ".experts." in name}
    for rank, half, quarter in zip(whole, halves, quarters, strict=True):
        assert torch.equal(half.stream, quarter.stream) and torch.equal(half.loss, quarter.loss)
        if model in ALONE:
            assert torch.equal(rank.stream, half.stream) and torch.equal(rank.loss, half.loss)
        for name, (first, *_), values in half.gradients:
            if name in of_experts and model in ADDED:
                of_experts[name][first : first + len(values)] = values
        for (name, _, one), (_, _, other) in zip(half.gradients, quarter.gradients, strict=True):
            assert name in of_experts or torch.equal(one, other), name
    for ranks in (halves, quarters):
        pieces = [[piece for piece in rank.gradients if piece[0] in of_experts] for rank in ranks]
        assert_pieces(pieces, of_experts, 1e-6)


def test_a_mesh_must_be_able_to_divide_the_experts() -> None:
    mesh = replace(ProcessMesh.single(), experts=CommGroup(range(4), 0, None))
    two = replace(mesh, tensor=CommGroup(range(2), 0, None), head_replicas={})
    for on, changes, problem in (
        (mesh, {"num_experts": 6}, "6 experts of a farskip model on 4 ranks"),
        (mesh, {"residual_mode": "desync", "desync_interval": 2, "desync_tp": 1}, "8 experts of a desync model"),
        (two, {}, "route the same tokens"),
    ):
        with pytest.raises(ValueError, match=problem):
            LanguageModel(small_model(**MODELS["farskip-routed-only"] | changes), on, device=torch.device("meta"))
    LanguageModel(small_model(**MODELS["farskip"]), replace(two, sequence_parallel=True), device=torch.device("meta"))
