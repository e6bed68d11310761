"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in one process. Shares no code with the package."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LATENT_EPSILON = 1e-6
"""Of the norms of latents in all published models, whatever the epsilon of their other norms is."""


def latent_shapes(config: Any, name: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight of an attention but those of its output, in the order of the model."""
    heads, h = config.num_attention_heads, config.hidden_size
    nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    query = heads * (nope + rope)
    shapes: dict[str, tuple[int, ...]] = {}
    if config.q_lora_rank:
        shapes |= _projection(config, f"{name}.q_a_proj", config.q_lora_rank)
    else:
        shapes[f"{name}.q_proj.weight"] = (query, h)
    shapes |= _projection(config, f"{name}.kv_a_proj", rank + rope)
    if config.q_lora_rank:
        shapes[f"{name}.q_a_norm.weight"] = (config.q_lora_rank,)
    shapes[f"{name}.kv_a_norm.weight"] = (rank,)
    if config.q_lora_rank:
        shapes[f"{name}.q_b_proj.weight"] = (query, config.q_lora_rank)
    shapes[f"{name}.kv_b_proj.weight"] = (heads * (nope + config.v_head_dim), rank)
    return shapes


def _projection(config: Any, name: str, rows: int) -> dict[str, tuple[int, ...]]:
    bias: dict[str, tuple[int, ...]] = {f"{name}.bias": (rows,)} if config.add_qkv_bias else {}
    return {f"{name}.weight": (rows, config.hidden_size), **bias}


def latent_attention(
    weights: Mapping[str, Tensor], name: str, config: Any, x: Tensor, turns: Tensor, visible: Tensor
) -> Tensor:
    """Return the heads' values [b, s, heads, v], mixed as each query sees them, of the normed stream x [b, s, h].

    Args:
        turns: [s, rope/2] or [b, s, rope/2] complex, with which each position multiplies the pairs of elements
            (2j, 2j + 1).
        visible: whether a query sees a key, broadcastable to [b, heads, queries, keys].
    """
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim

    def project(which: str, values: Tensor) -> Tensor:
        product = values @ weights[f"{name}.{which}.weight"].T
        return product + weights[f"{name}.{which}.bias"] if f"{name}.{which}.bias" in weights else product

    def norm(which: str, values: Tensor) -> Tensor:
        size = torch.sqrt((values * values).mean(dim=-1, keepdim=True) + LATENT_EPSILON)
        return values / size * weights[f"{name}.{which}.weight"]

    query = (
        project("q_b_proj", norm("q_a_norm", project("q_a_proj", x))) if config.q_lora_rank else project("q_proj", x)
    )
    query = query.reshape(*x.shape[:2], heads, nope + rope)
    compressed = project("kv_a_proj", x)
    latent, shared_key = compressed[..., :-rope], compressed[..., -rope:]
    expanded = project("kv_b_proj", norm("kv_a_norm", latent)).reshape(*x.shape[:2], heads, nope + config.v_head_dim)
    key, value = expanded[..., :nope], expanded[..., nope:]

    turned_query = _turn_pairs(query[..., nope:], turns[..., None, :])
    turned_key = _turn_pairs(shared_key, turns)
    scores = torch.einsum("bqnd,bknd->bnqk", query[..., :nope], key)
    scores = scores + torch.einsum("bqnd,bkd->bnqk", turned_query, turned_key)
    magnitude = 0.1 * config.rope_mscale_all_dim * math.log(config.rope_scaling_factor) + 1
    scores = scores * magnitude**2 / math.sqrt(nope + rope)
    probabilities = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
    return torch.einsum("bnqk,bknd->bqnd", probabilities, value)


def _turn_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """Turn elements 2j and 2j + 1 as one complex number."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns.to(pairs.dtype)).flatten(-2)
