"""Experts compared with transformers' gpt-oss: biases, softmax over the chosen experts, and its gated activation."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from megatron_ladder.blueprint.model import ModelConfig, head_replicas
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.model.experts import Experts
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.operations import ExpertOptions
from megatron_ladder.model.sub_block import SequenceContext
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import Pieces, assert_pieces, fill_slices, gradient_pieces, mesh_of, small_model
from tests.reference import ReferenceConfig, make_weights

TOLERANCE = 1e-5
ROUTER, EXPERTS = "layers.0.router", "layers.0.experts"


class Outcome(NamedTuple):
    """What a rank found."""

    output: Tensor
    """Summed over the ranks, as `grad_x`."""
    grad_x: Tensor
    gradients: Pieces


def model_of_experts(experts: int) -> ModelConfig:
    """Return a model of one layer of experts, as in gpt-oss, whose number need not be divisible by the ranks."""
    return small_model(
        num_layers=1,
        num_experts=experts,
        moe_router_topk=4,
        moe_layers=(0,),
        moe_ffn_hidden_size=12,
        add_moe_bias=True,
        quick_geglu=True,
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
    )


def canonical(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of transformers' module, whose experts have gates and ups as alternate columns [E, in, out]."""
    found = {f"{ROUTER}.{kind}": tensors[f"router.{kind}"] for kind in ("weight", "bias")}
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        gate_up, down = tensors[f"experts.gate_up_proj{suffix}"], tensors[f"experts.down_proj{suffix}"]
        parts = {"gate": gate_up[..., 0::2], "up": gate_up[..., 1::2], "down": down}
        found |= {f"{EXPERTS}.{name}_proj.{kind}": part for name, part in parts.items()}
    return {name: tensor.transpose(1, 2) if tensor.dim() == 3 else tensor for name, tensor in found.items()}


def of_transformers(config: ModelConfig) -> Any:
    """Return transformers' module, whose activations are often beyond the bound for inputs of a few units.

    Most tokens choose the first half of the experts, so that a rank recomputes some products of whole ones.
    """
    theirs = GptOssConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_ffn_hidden_size,
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.moe_router_topk,
        experts_implementation="eager",
    )
    module = GptOssMLP(theirs)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    module.router.bias.data[: config.num_experts // 2] += 15
    return module


def run_experts(
    config: ModelConfig, weights: dict[str, Tensor], sharding: Any, ranks: int, x: Tensor, gradient: Tensor
) -> Outcome:
    mesh = mesh_of(ranks, head_replicas(config, ranks)) if ranks > 1 else ProcessMesh.single()
    model = LanguageModel(config, mesh, experts=ExpertOptions(sharding=sharding))
    fill_slices(model, weights)
    (body,) = (module for module in model.modules() if isinstance(module, Experts))
    x = x.clone().requires_grad_()
    partial = body(x, SequenceContext(torch.zeros(1, 1))).partial
    partial.backward(gradient)
    assert x.grad is not None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    pieces = [piece for piece in gradient_pieces(model) if piece[0].startswith((ROUTER, EXPERTS))]
    return Outcome(mesh.tensor.all_reduce(partial.detach().clone()), x.grad, pieces)


@pytest.mark.parametrize(
    ("ranks", "sharding", "experts"),
    [(1, "width", 6), (2, "width", 6), (4, "width", 6), (2, "experts", 6), (4, "experts", 8)],
)
def test_experts_are_those_of_gpt_oss(
    gloo_pools: GlooPools, ranks: int, sharding: Literal["width", "experts"], experts: int
) -> None:
    config = model_of_experts(experts)
    module = of_transformers(config)
    weights = make_weights(ReferenceConfig.like(config), seed=1)
    weights |= {name: tensor.detach().contiguous() for name, tensor in canonical(module.state_dict()).items()}
    generator = torch.Generator().manual_seed(2)
    # Every expert has tokens.
    x, gradient = (torch.randn(75, 2, config.hidden_size, generator=generator) * scale for scale in (3, 1))
    theirs = x.clone().requires_grad_()
    expected, _ = module(theirs)
    expected.backward(gradient)
    assert theirs.grad is not None
    gradients = canonical({name: parameter.grad for name, parameter in module.named_parameters()})

    outcomes = gloo_pools(ranks).run(run_experts, config, weights, sharding, ranks, x, gradient)
    for outcome in outcomes:
        for found, wanted in ((outcome.output, expected), (outcome.grad_x, theirs.grad)):
            assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    assert_pieces([outcome.gradients for outcome in outcomes], gradients, TOLERANCE)
