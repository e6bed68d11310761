"""Rotary position embedding, half-rotated as in transformers' Llama.

Pair j of the first d elements of a head, `rotary_percent` of it (elements j and j + d/2), is rotated at position p by
p * f_j, with f_j = base^(-2j/d), scaled for longer contexts as configured.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.blueprint.mixers.attention import Attention, attention_factor


class RotaryTable(NamedTuple):
    """Cosines and sines of positions, broadcastable over heads: [s, b or 1, 1, d]; negative sines in the first half."""

    cos: Tensor
    sin: Tensor


def _rotary_frequencies(mixer: Attention, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return f_j for j in 0 .. d/2-1, in radians per position.

    `linear` divides all frequencies by the factor. `llama3` (Llama 3.1) divides those whose wavelength exceeds
    original/low, keeps those below original/high, and interpolates linearly in original/wavelength between. `yarn`
    (arXiv 2309.00071) keeps those of at least beta_fast turns in the original positions, divides those of at most
    beta_slow turns, and interpolates linearly in j between, by default between whole indices.
    """
    config, width = mixer.config, mixer.rotary_dim
    exponents = torch.arange(0, width, 2, dtype=torch.int64, device=device).to(dtype) / width
    frequencies = 1.0 / (config.rotary_base**exponents)
    if config.rope_scaling == "linear":
        return frequencies / config.rope_scaling_factor
    if config.rope_scaling == "none":
        return frequencies
    if config.rope_scaling == "llama3":
        turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        unscaled_part = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    else:
        first, last = _yarn_range(mixer)
        indices = torch.arange(width // 2, dtype=dtype, device=device)
        unscaled_part = 1 - ((indices - first) / (last - first)).clamp(0.0, 1.0)
    return (1 - unscaled_part) * frequencies / config.rope_scaling_factor + unscaled_part * frequencies


def _yarn_range(mixer: Attention) -> tuple[float, float]:
    """Return the indices j of the last frequency that YaRN keeps, and of the first one that it scales in full."""

    config, width = mixer.config, mixer.rotary_dim

    def index_of(turns: float) -> float:
        length = config.rope_original_max_position_embeddings / (2 * math.pi)
        return width * math.log(length / turns) / (2 * math.log(config.rotary_base))

    first, last = index_of(config.rope_beta_fast), index_of(config.rope_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last + 0.001 if first == last else last


def rotary_table(mixer: Attention, positions: Tensor, compute_dtype: torch.dtype) -> RotaryTable:
    """Return cosines and sines for integer positions [s, b or 1].

    They are fp64 for fp64 models and fp32 for all others: rounding to half precision would shift far positions.
    """
    dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    angles = positions.to(dtype).unsqueeze(-1) * _rotary_frequencies(mixer, dtype, positions.device)
    factor = attention_factor(mixer.config)
    cos, sin = factor * angles.cos(), factor * angles.sin()
    return RotaryTable(torch.cat((cos, cos), dim=-1).unsqueeze(2), torch.cat((-sin, sin), dim=-1).unsqueeze(2))


def apply_rotary(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotate x [s, b, heads, d] by its positions; the dtype is kept."""
    width = table.cos.shape[-1]
    x, unrotated = x[..., :width], x[..., width:]
    first, second = x.chunk(2, dim=-1)
    rotated = (x * table.cos + torch.cat((second, first), dim=-1) * table.sin).to(x.dtype)
    return torch.cat((rotated, unrotated), dim=-1) if unrotated.shape[-1] else rotated
