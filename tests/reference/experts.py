"""Routed experts, their balancing losses and the wirings that only they have, in plain arithmetic.

Every expert computes every token, and the weights of those that were not chosen are zero. Layouts: stream [b, s, h],
scores and weights [b, s, E].
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SubBlock = Callable[[Tensor], Tensor]


class Routed(NamedTuple):
    """What the routers of one layer add to the record of a forward pass."""

    layer: str
    """`layers.N`."""
    auxiliary_loss: Tensor
    """Summed over tokens, with its coefficient."""
    z_loss: Tensor
    """Likewise."""
    loads: Tensor
    """Number of tokens that chose each expert, [E]."""


class Layer(NamedTuple):
    """The sub-blocks of a layer by kind."""

    late: bool
    """Whether it is one of `ladder_layers`."""
    sub_blocks: Mapping[str, SubBlock]


def layer_kinds(config: Any, layer: int) -> tuple[str, ...]:
    """Return the kinds of a layer's sub-blocks in order."""
    mode, routed = config.residual_mode, layer in config.moe_layers
    if mode == "longcat":
        return ("attention", *["routed_experts"] * routed, "mlp", "attention_2", "mlp_2")
    if config.one_norm:
        return ("attention_experts",) if routed else ("attention_mlp",)
    if not routed:
        return ("attention", "mlp")
    if layer in config.ladder_layers and mode == "farskip":
        return ("attention", *["shared_expert"] * (config.moe_shared_expert_intermediate_size > 0), "routed_experts")
    if layer in config.ladder_layers and mode == "shortcut":
        return ("attention", "routed_experts", "shared_expert")
    return ("attention", "experts")


def farskip(stream: Tensor, layers: Sequence[Layer]) -> Tensor:
    """Attention misses the routed experts before it, the shared expert attention, the routed experts both."""
    routed = torch.zeros_like(stream)
    for late, h in layers:
        if late:
            attended = h["attention"](stream)
            stream = stream + routed
            routed = h["routed_experts"](stream) if "routed_experts" in h else torch.zeros_like(stream)
            beside = [h[kind](stream) for kind in ("shared_expert", "mlp") if kind in h]
            stream = sum(beside, stream + attended)
        else:
            stream, routed = stream + routed, torch.zeros_like(stream)
            stream = stream + h["attention"](stream)
            stream = stream + h["experts" if "experts" in h else "mlp"](stream)
    return stream + routed


def shortcut(stream: Tensor, layers: Sequence[Layer]) -> Tensor:
    """The routed experts read the stream before attention, the shared expert misses them."""
    for _, h in layers:
        before = stream
        stream = stream + h["attention"](stream)
        if "routed_experts" in h:
            stream = stream + h["shared_expert"](stream) + h["routed_experts"](before)
        else:
            stream = stream + h["experts" if "experts" in h else "mlp"](stream)
    return stream


def longcat(stream: Tensor, layers: Sequence[Layer]) -> Tensor:
    """What follows the routed experts in their layer misses them."""
    for late, h in layers:
        stream = stream + h["attention"](stream)
        routed = h["routed_experts"](stream) if "routed_experts" in h else torch.zeros_like(stream)
        if not late:
            stream, routed = stream + routed, torch.zeros_like(stream)
        stream = stream + h["mlp"](stream)
        stream = stream + h["attention_2"](stream)
        stream = stream + h["mlp_2"](stream)
        stream = stream + routed
    return stream


RECURRENCES: dict[str, Callable[[Tensor, Sequence[Layer]], Tensor]] = {
    "farskip": farskip,
    "shortcut": shortcut,
    "longcat": longcat,
}


def routed_experts(
    weights: Mapping[str, Tensor],
    layer: str,
    config: Any,
    x: Tensor,
    record: list[Routed] | None,
    token_mask: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum over each token's experts, for a normed stream."""
    no_biases = x.new_zeros(config.num_experts, 1)
    logits = x @ weights[f"{layer}.router.weight"].T + weights.get(f"{layer}.router.bias", x.new_zeros(()))
    scores = torch.softmax(logits, -1) if config.moe_router_score_function == "softmax" else torch.sigmoid(logits)
    biased = scores.detach()
    if config.moe_router_enable_expert_bias:
        biased = biased + weights[f"{layer}.router.expert_bias"]
    chosen = choice(biased, config)
    of_chosen = torch.where(chosen, scores, 0.0)
    if not config.moe_router_unnormalized:
        tiny = 1e-20 if config.moe_router_score_function == "sigmoid" else 0.0
        of_chosen = of_chosen / (of_chosen.sum(-1, keepdim=True) + tiny)
    of_chosen = of_chosen * config.moe_router_topk_scaling_factor
    if record is not None:
        counted = torch.ones_like(chosen[..., 0]) if token_mask is None else token_mask
        loads = chosen[counted].to(x.dtype).sum(0)
        balancing, z_loss = auxiliary_loss(scores, chosen, counted, config), router_z_loss(logits[counted], config)
        record.append(Routed(layer, balancing, z_loss, loads))
    gate, up, down = (weights[f"{layer}.experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    biases = {name: weights.get(f"{layer}.experts.{name}_proj.bias", no_biases) for name in ("gate", "up", "down")}
    gates = torch.einsum("bsh,efh->bsef", x, gate) + biases["gate"]
    ups = torch.einsum("bsh,efh->bsef", x, up) + biases["up"]
    outputs = torch.einsum("bsef,ehf->bseh", gated_units(gates, ups, config), down) + biases["down"]
    return torch.einsum("bse,bseh->bsh", of_chosen, outputs)


def gated_units(gates: Tensor, ups: Tensor, config: Any) -> Tensor:
    """Return what gates let through: SiLU, or gpt-oss's unit, whose gates have no lower bound."""
    if config.activation_func_clamp_value is not None:
        limit = torch.tensor(config.activation_func_clamp_value, dtype=gates.dtype)
        gates, ups = torch.minimum(gates, limit), torch.maximum(torch.minimum(ups, limit), -limit)
    slope = 1.702 if config.quick_geglu else 1.0
    return gates * torch.sigmoid(slope * gates) * (ups + config.glu_linear_offset)


def choice(biased: Tensor, config: Any) -> Tensor:
    """Return whether each token chooses each expert: those of highest score inside the groups of highest score."""
    if config.moe_router_num_groups > 1:
        groups = biased.unflatten(-1, (config.moe_router_num_groups, -1))
        # arXiv 2405.04434 ranks groups by their best score, arXiv 2412.19437 by the sum of two.
        ranks = groups.topk(2, -1).values.sum(-1) if config.moe_router_enable_expert_bias else groups.amax(-1)
        best = torch.zeros_like(ranks, dtype=torch.bool)
        best.scatter_(-1, ranks.topk(config.moe_router_group_topk, -1).indices, True)
        biased = groups.masked_fill(~best[..., None], -torch.inf).flatten(-2)
    chosen = torch.zeros_like(biased, dtype=torch.bool)
    return chosen.scatter_(-1, biased.topk(config.moe_router_topk, -1).indices, True)


def auxiliary_loss(scores: Tensor, chosen: Tensor, counted: Tensor, config: Any) -> Tensor:
    """Return the Switch loss of a layer, E sum_e (share of choices of e) (mean score of e), times the tokens."""
    if config.moe_router_load_balancing_type == "aux_loss":
        scores, chosen, counted = (tensor.flatten(0, 1)[None] for tensor in (scores, chosen, counted))
    total = torch.zeros((), dtype=scores.dtype)
    for row, mask in enumerate(counted):
        mean_scores = (scores[row][mask] / scores[row][mask].sum(-1, keepdim=True)).mean(0)
        share = chosen[row][mask].to(scores.dtype).mean(0) / config.moe_router_topk
        total = total + int(mask.sum()) * config.num_experts * (share * mean_scores).sum()
    return config.moe_aux_loss_coeff * total


def router_z_loss(logits: Tensor, config: Any) -> Tensor:
    """Return the squares of the log of the sum of exponentials, summed over tokens."""
    return config.moe_z_loss_coeff * torch.log(torch.exp(logits).sum(-1)).square().sum()
