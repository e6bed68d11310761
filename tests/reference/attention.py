"""Attention of the reference, by the head or from latents (DeepSeek-V2, arXiv 2405.04434), and its rotary embedding."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents in all published models; that of their other norms differs."""


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
        return linear(weights, f"{name}.{which}", values)

    def norm(which: str, values: Tensor) -> Tensor:
        return rms_norm(values, weights[f"{name}.{which}.weight"], LATENT_EPSILON)

    if config.q_lora_rank:
        query = project("q_b_proj", norm("q_a_norm", project("q_a_proj", x)))
    else:
        query = project("q_proj", x)
    query = query.reshape(*x.shape[:2], heads, nope + rope)
    compressed = project("kv_a_proj", x)
    latent, shared_key = compressed[..., :-rope], compressed[..., -rope:]
    expanded = project("kv_b_proj", norm("kv_a_norm", latent)).reshape(*x.shape[:2], heads, nope + config.v_head_dim)
    key, value = expanded[..., :nope], expanded[..., nope:]

    turned_query = _turn_pairs(query[..., nope:], turns[..., None, :])
    turned_key = _turn_pairs(shared_key, turns)
    scores = torch.einsum("bqnd,bknd->bnqk", query[..., :nope], key)
    scores = scores + torch.einsum("bqnd,bkd->bnqk", turned_query, turned_key)
    scores = scores * _magnitude(config, config.rope_mscale_all_dim) ** 2 / math.sqrt(nope + rope)
    probabilities = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
    return torch.einsum("bnqk,bknd->bqnd", probabilities, value)


def _turn_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """Turn elements 2j and 2j + 1 as one complex number."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns.to(pairs.dtype)).flatten(-2)


def inverse_frequencies(config: Any) -> list[float]:
    """Return the radians per position of each rotated pair; d is the rotated part of a head.

    none: base^(-2i/d) (Su et al., arXiv 2104.09864). linear: positions divided by the factor (Chen et al., arXiv
    2306.15595). llama3: as published with Llama 3.1: wavelengths above L/low are stretched by the factor, those
    below L/high are kept, and between the two the frequency is interpolated linearly in L/wavelength. yarn (Peng et
    al., arXiv 2309.00071): as in DeepSeek's code, linearly in i between the indices that turn beta_fast and beta_slow
    times in L positions, rounded outwards unless as in gpt-oss.
    """
    rotated = config.rotary_width
    plain = [config.rotary_base ** (-2 * i / rotated) for i in range(rotated // 2)]
    factor, low, high = config.rope_scaling_factor, config.rope_low_freq_factor, config.rope_high_freq_factor
    if config.rope_scaling == "none":
        return plain
    if config.rope_scaling == "linear":
        return [frequency / factor for frequency in plain]
    if config.rope_scaling == "yarn":
        ramp = _yarn_ramp(config, rotated)
        return [(1 - part) * plain[i] + part * plain[i] / factor for i, part in enumerate(ramp)]
    if config.rope_scaling != "llama3":
        raise ValueError(f"rope_scaling {config.rope_scaling!r} is none of none, linear, llama3, yarn")
    scaled = []
    for frequency in plain:
        periods = config.rope_original_max_position_embeddings * frequency / (2 * math.pi)
        kept = min(1.0, max(0.0, (periods - low) / (high - low)))
        scaled.append(kept * frequency + (1 - kept) * frequency / factor)
    return scaled


def _yarn_ramp(config: Any, rotated: int) -> list[float]:
    """Return how far each frequency of YaRN is scaled, 0 to 1."""
    length, base = config.rope_original_max_position_embeddings, config.rotary_base
    # base^(-2i/d) L = 2 pi beta, solved for i.
    fast, slow = (
        rotated / 2 * math.log(length / (2 * math.pi * beta), base)
        for beta in (config.rope_beta_fast, config.rope_beta_slow)
    )
    if config.yarn_correction_range_round_to_int:
        fast, slow = math.floor(fast), math.ceil(slow)
    low, high = max(0.0, fast), min(rotated - 1.0, slow)
    if low == high:
        high += 0.001
    return [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(rotated // 2)]


def rotary_magnitude(config: Any) -> float:
    """Return the factor on cosines and sines: 0.1 mscale ln(factor) + 1 of YaRN, over that of the other mscale."""
    if config.rope_scaling != "yarn" or config.rope_scaling_factor <= 1:
        return 1.0
    return _magnitude(config, config.rope_mscale) / _magnitude(config, config.rope_mscale_all_dim)


def _magnitude(config: Any, mscale: float) -> float:
    return 0.1 * mscale * math.log(config.rope_scaling_factor) + 1


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + epsilon) * weight


def model_norm(x: Tensor, weight: Tensor, config: Any) -> Tensor:
    """Return the norm of the stream, or of queries or keys."""
    return rms_norm(x, 1 + weight if config.apply_layernorm_1p else weight, config.norm_epsilon)


def linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def grouped_attention(
    weights: Mapping[str, Tensor], prefix: str, config: Any, x: Tensor, rotary_positions: Tensor, visible: Tensor
) -> Tensor:
    batch, length, _ = x.shape
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    query = linear(weights, f"{prefix}.q_proj", x).reshape(batch, length, heads, d)
    key = linear(weights, f"{prefix}.k_proj", x).reshape(batch, length, kv_heads, d)
    value = linear(weights, f"{prefix}.v_proj", x).reshape(batch, length, kv_heads, d)
    if config.qk_layernorm:
        query = model_norm(query, weights[f"{prefix}.q_norm.weight"], config)
        key = model_norm(key, weights[f"{prefix}.k_norm.weight"], config)
    query, key = _rotate(query, config, rotary_positions), _rotate(key, config, rotary_positions)

    kv_head_of_query_head = [head // (heads // kv_heads) for head in range(heads)]
    key, value = key[:, :, kv_head_of_query_head], value[:, :, kv_head_of_query_head]

    scores = torch.einsum("bqnd,bknd->bnqk", query, key) / math.sqrt(d)
    scores = scores.masked_fill(~visible, -math.inf)
    if config.softmax_type == "learnable":
        sinks = weights[f"{prefix}.sinks"].reshape(1, heads, 1, 1).expand(batch, heads, length, 1)
        probabilities = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :length]
    else:
        probabilities = torch.softmax(scores, dim=-1)
    return torch.einsum("bnqk,bknd->bqnd", probabilities, value)


def _rotate(x: Tensor, config: Any, position: Tensor) -> Tensor:
    """Rotate the pair (i, i + d/2) of every head at position t, [s] or [b, s], by t times the i-th frequency.

    d is the rotated part of a head.
    """
    angle = position.double()[..., None] * torch.tensor(inverse_frequencies(config), dtype=torch.float64)
    tables = (rotary_magnitude(config) * table for table in (torch.cos(angle), torch.sin(angle)))
    cos, sin = (table[..., None, :].to(x.dtype) for table in tables)
    rotated = 2 * cos.shape[-1]
    first, second = x[..., :rotated].chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., rotated:]], dim=-1)
