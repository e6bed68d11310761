"""Mixtures of experts: loss and all gradients in every wiring and layout, compared with a plain model."""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig, key_value_replicas
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import ExpertOptions
from megatron_ladder.model.stack import StackOptions
from tests.helpers.pairwise import pairwise
from tests.helpers.pool import GlooPools
from tests.helpers.recording import InlineQueue
from tests.helpers.sharded import Pieces, assert_pieces, fill_slices, gradient_pieces, mesh_of, small_model
from tests.reference import ReferenceConfig, Weights, make_weights, reference_gradients

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


def batches(count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(count):
        tokens = torch.randint(0, 101, (2, 9), generator=generator)
        mask = (torch.rand(2, 8, generator=generator) < 0.4 + 0.2 * index).double()
        found.append((tokens[:, :-1], tokens[:, 1:], mask))
    return found


def run_case(config: ModelConfig, weights: Weights, experts: ExpertOptions, how: How) -> tuple[float, Pieces]:
    """Return the sum of all losses and the gradients, of several micro-batches through one or two ranges of layers."""
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
    micro_batches = batches(how.micro_batches)
    scale = 1 / sum(float(mask.sum()) for *_, mask in micro_batches)
    for tokens, labels, mask in micro_batches:
        entered: list[Tensor] = []
        left = tokens
        for part in parts:
            entered.append(left.detach().clone().requires_grad_() if entered else left)
            left = part.stage(entered[-1], loss_scale=scale)
            entered.append(left)
        loss = parts[-1].loss(left[0], labels, mask) * scale
        loss.backward()
        for index in reversed(range(len(parts) - 1)):
            entered[2 * index + 1].backward(entered[2 * index + 2].grad)
        loss_sum += loss.item()
    loss_sum += sum(float(part.take_extra_losses().sum()) * scale for part in parts)
    return loss_sum, [piece for part in parts for piece in gradient_pieces(part)]


def check(gloo_pools: GlooPools, config: ModelConfig, how: How, **losses: Any) -> None:
    reference = replace(ReferenceConfig.like(config), **losses)
    weights = make_weights(reference, seed=1, dtype=torch.float64)
    expected_loss, expected = 0.0, dict[str, Tensor]()
    micro_batches = batches(how.micro_batches)
    total = sum(float(mask.sum()) for *_, mask in micro_batches)
    for tokens, labels, mask in micro_batches:
        loss, gradients = reference_gradients(weights, reference, tokens, labels, mask, total)
        expected_loss += loss.item()
        expected = {name: expected[name] + one if expected else one for name, one in gradients.items()}
    experts = ExpertOptions(
        reference.moe_aux_loss_coeff,
        reference.moe_router_load_balancing_type,
        reference.moe_z_loss_coeff,
        how.sharding,
    )
    results = gloo_pools(how.ranks).run(run_case, config, weights, experts, how)
    assert [found for found, _ in results] == pytest.approx([expected_loss] * how.ranks, rel=TOLERANCE)
    assert_pieces([pieces for _, pieces in results], expected, TOLERANCE)


@pytest.mark.parametrize(
    ("wiring", "layout", "recompute", "cuts", "micro_batches", "variant"),
    pairwise(
        (list(WIRINGS), list(LAYOUTS), [0, 3], [(), (1, 3)], [1, 3], list(VARIANTS)),
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
    check(gloo_pools, small_model(**WIRINGS[wiring]), how, **losses)
