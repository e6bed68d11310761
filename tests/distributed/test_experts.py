"""Mixtures of experts: loss and all gradients in every wiring and layout, compared with a plain model."""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.experts import Router
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import ExpertOptions
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.layout import parameter_sections
from tests.helpers.pairwise import pairwise
from tests.helpers.pool import GlooPools
from tests.helpers.recording import InlineQueue
from tests.helpers.sharded import Pieces, assert_pieces, fill_slices, gradient_pieces, mesh_of, small_model
from tests.reference import ReferenceConfig, Routed, Weights, make_weights, reference_gradients, reference_logits

TOLERANCE = 1e-11
ALL = (0, 1, 2, 3)
QWEN: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 8,
    "moe_layers": ALL,
    "qk_layernorm": True,
}
GLM: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "moe_layers": (1, 2, 3),
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "rotary_percent": 0.5,
}
SHARED = GLM | {"moe_layers": ALL, "moe_router_unnormalized": True, "moe_router_score_function": "softmax"}
WIRINGS: dict[str, dict[str, Any]] = {
    "standard": GLM,
    "ladder": {**QWEN, "residual_mode": "ladder", "ladder_layers": ALL},
    "hybrid": {**GLM, "residual_mode": "ladder", "ladder_layers": (1, 3)},
    "parallel": {**GLM, "residual_mode": "parallel"},
    "ladder-parallel": {**SHARED, "residual_mode": "ladder-parallel", "ladder_layers": ALL},
    "ladder-attention": {**QWEN, "residual_mode": "ladder-attention", "ladder_layers": (0, 1, 3)},
    "staleness-3": {**GLM, "residual_mode": "ladder", "ladder_layers": ALL, "residual_staleness": 3},
    "farskip": {**SHARED, "residual_mode": "farskip", "ladder_layers": ALL},
    "farskip-dense": {**GLM, "moe_layers": (0, 2), "residual_mode": "farskip", "ladder_layers": ALL},
    "farskip-hybrid": {**SHARED, "residual_mode": "farskip", "ladder_layers": (0, 2)},
    "farskip-routed-only": {**QWEN, "residual_mode": "farskip", "ladder_layers": (1, 2, 3)},
    "shortcut": {**GLM, "residual_mode": "shortcut", "ladder_layers": ALL},
    "shortcut-hybrid": {**SHARED, "residual_mode": "shortcut", "ladder_layers": (1, 2)},
    "longcat": {**QWEN, "residual_mode": "longcat", "ladder_layers": ALL},
    "longcat-hybrid": {**QWEN, "moe_layers": (0, 2), "residual_mode": "longcat", "ladder_layers": (0, 1)},
}
LAYOUTS = {"1": (1, False), "2": (2, False), "2-sp": (2, True), "4": (4, False), "4-sp": (4, True)}
"""Tensor-parallel size, and whether the stream is sharded."""

PER_SEQUENCE = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "overlap": ("overlap", "width", PER_SEQUENCE),
    "reads-ahead": ("reads-ahead", "experts", PER_SEQUENCE | {"moe_router_load_balancing_type": "aux_loss"}),
    "forward-overlap": ("forward-overlap", "experts", PER_SEQUENCE),
    "blocking": ("blocking", "width", {}),
}
"""Overlap, sharding and balancing losses."""


class How(NamedTuple):
    """What must not change the result."""

    ranks: int
    sequence_parallel: bool
    sharding: str
    overlap: str
    recompute: int
    cuts: tuple[int, ...]
    micro_batches: int


Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens, labels and loss mask, [b, s]."""


class Outcome(NamedTuple):
    """What a rank found."""

    loss: float
    """With the balancing losses."""
    loads: list[list[int]]
    """How many tokens chose each expert, by layer."""
    gradients: Pieces


def run_case(config: ModelConfig, weights: Weights, experts: ExpertOptions, how: How, batch: Batch) -> Outcome:
    """Run the micro-batches of a batch through one or several ranges of layers."""
    replicas = key_value_replicas(config, how.ranks)
    mesh = mesh_of(how.ranks, replicas) if how.ranks > 1 else ProcessMesh.single()
    mesh = replace(mesh, sequence_parallel=how.sequence_parallel)
    options = StackOptions(how.overlap != "blocking", how.recompute, mirrored_backward=how.overlap != "forward-overlap")
    parts = []
    for bound in itertools.pairwise((0, *how.cuts, config.num_layers)):
        part = LanguageModel(config, mesh, options, layers=range(*bound), dtype=torch.float64, experts=experts)
        fill_slices(part, weights)
        part.stack.side_queue = InlineQueue() if how.overlap == "reads-ahead" and how.sequence_parallel else None
        part.stack.partial_sums.expect(how.micro_batches)
        parts.append(part)
    loss_sum = 0.0
    for tokens, labels, mask in micro_batches(batch, how.micro_batches):
        entered: list[Tensor] = []
        left = tokens
        for part in parts:
            entered.append(left.detach().clone().requires_grad_() if entered else left)
            left = part.stage(entered[-1], loss_scale=1 / tokens_of(batch))
            entered.append(left)
        loss = parts[-1].loss(left[0], labels, mask) / tokens_of(batch)
        loss.backward()
        for index in reversed(range(len(parts) - 1)):
            entered[2 * index + 1].backward(entered[2 * index + 2].grad)
        loss_sum += loss.item()
    loss_sum += sum(float(part.take_extra_losses().sum()) for part in parts) / tokens_of(batch)
    loads = [module.loads.tolist() for part in parts for module in part.modules() if isinstance(module, Router)]
    return Outcome(loss_sum, loads, [piece for part in parts for piece in gradient_pieces(part)])


def make_batch(config: ModelConfig) -> Batch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:], (torch.rand(4, 8, generator=generator) < 0.6).double()


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    return list(zip(*(part.chunk(count) for part in batch), strict=True))


def tokens_of(batch: Batch) -> float:
    """Return the divisor of the losses."""
    return max(1.0, float(batch[2].sum()))


def check(gloo_pools: GlooPools, config: ModelConfig, how: How, batch: Batch, **losses: Any) -> None:
    reference = replace(ReferenceConfig.like(config), **losses)
    weights = make_weights(reference, seed=1, dtype=torch.float64)
    expected_loss, expected = 0.0, dict[str, Tensor]()
    # All losses but that of whole micro-batches are the same for the whole batch at once.
    is_whole = reference.moe_router_load_balancing_type == "seq_aux_loss"
    for part in micro_batches(batch, 1 if is_whole else how.micro_batches):
        loss, gradients = reference_gradients(weights, reference, *part, tokens_of(batch))
        expected_loss += loss.item()
        expected = {name: expected[name] + one if expected else one for name, one in gradients.items()}
    record: list[Routed] = []
    reference_logits(weights, reference, batch[0], record=record)
    experts = ExpertOptions(
        reference.moe_aux_loss_coeff,
        reference.moe_router_load_balancing_type,
        reference.moe_z_loss_coeff,
        how.sharding,
    )
    outcomes = gloo_pools(how.ranks).run(run_case, config, weights, experts, how, batch)
    for loss, loads, _ in outcomes:
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert loads == [routed.loads.tolist() for routed in record]
    assert_pieces([outcome.gradients for outcome in outcomes], expected, TOLERANCE)


@pytest.mark.parametrize(
    ("wiring", "layout", "recompute", "cuts", "micro_batches", "variant"),
    pairwise(
        (list(WIRINGS), list(LAYOUTS), [0, 3], [(), (1, 3)], [1, 2], list(VARIANTS)),
        (str, lambda layout: f"tp{layout}", ["kept", "recomputed"], ["whole", "cut"], ["one", "accumulated"], str),
    ),
)
def test_every_wiring_and_layout(
    gloo_pools: GlooPools,
    wiring: str,
    layout: str,
    recompute: int,
    cuts: tuple[int, ...],
    micro_batches: int,
    variant: str,
) -> None:
    overlap, sharding, losses = VARIANTS[variant]
    how = How(*LAYOUTS[layout], sharding, overlap, recompute, cuts, micro_batches)
    config = small_model(**WIRINGS[wiring])
    check(gloo_pools, config, how, make_batch(config), **losses)


@pytest.mark.parametrize(
    ("wiring", "layout", "recompute", "micro_batches", "kind"),
    pairwise(
        (["standard", "farskip"], list(LAYOUTS), [0, 3], [1, 4], ["seq_aux_loss", "aux_loss"]),
        (str, lambda layout: f"tp{layout}", ["kept", "recomputed"], ["one", "accumulated"], str),
    ),
)
def test_balancing_losses_alone(
    gloo_pools: GlooPools, wiring: str, layout: str, recompute: int, micro_batches: int, kind: str
) -> None:
    """No target counts, so that a balancing loss multiplied by the ranks is not hidden by the gradient of the rest."""
    how = How(*LAYOUTS[layout], "width", "overlap", recompute, (), micro_batches)
    config = small_model(**WIRINGS[wiring])
    tokens, labels, mask = make_batch(config)
    losses = PER_SEQUENCE | {"moe_router_load_balancing_type": kind}
    check(gloo_pools, config, how, (tokens, labels, torch.zeros_like(mask)), **losses)


def initial_pieces(config: ModelConfig, ranks: int, sharding: Any) -> Pieces:
    """Return this rank's slices of the initial weights."""
    mesh = mesh_of(ranks, key_value_replicas(config, ranks))
    model = LanguageModel(config, mesh, seed=7, experts=ExpertOptions(sharding=sharding))
    return [
        (section.name, section.box.offset, section.view(parameter.detach()).clone())
        for parameter, sections in parameter_sections(model)
        for section in sections
    ]


@pytest.mark.parametrize("sharding", ["width", "experts"])
def test_initial_experts_do_not_depend_on_the_layout(gloo_pools: GlooPools, sharding: str) -> None:
    config = small_model(
        **GLM | {"moe_ffn_hidden_size": 200, "init_method_std": 0.5, "num_layers": 2, "moe_layers": (1,)}
    )
    (whole,) = gloo_pools(1).run(initial_pieces, config, 1, sharding)
    full = {name: values for name, _, values in whole}
    for ranks in (2, 4):
        assert_pieces(gloo_pools(ranks).run(initial_pieces, config, ranks, sharding), full, 0.0)
    experts = full["layers.1.experts.gate_proj.weight"]
    assert experts.std().item() == pytest.approx(0.5, rel=0.05)
    assert full["layers.1.experts.down_proj.weight"].std().item() == pytest.approx(0.5 / 4**0.5, rel=0.05)
    assert len({tuple(values) for values in experts.flatten(1)[:, :8].tolist()}) == 8, "some experts are equal"
    assert not torch.equal(experts, full["layers.1.experts.up_proj.weight"])
