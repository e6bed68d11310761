"""Gated DeltaNet of the reference, token by token (Yang et al., arXiv 2412.06464; gates as in Qwen3-Next)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference.attention import linear, rms_norm


def delta_shapes(config: Any, name: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight but that of the output, in the order of the model."""
    heads, h = config.linear_num_value_heads, config.hidden_size
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    widths = {"q": keys, "k": keys, "v": values, "gate": values, "b": heads, "a": heads}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{which}_proj.weight": (width, h) for which, width in widths.items()}
    for which in ("q", "k", "v"):
        shapes[f"{name}.{which}_conv.weight"] = (widths[which], config.linear_conv_kernel_dim)
    return shapes | {
        f"{name}.A_log": (heads,),
        f"{name}.dt_bias": (heads,),
        f"{name}.norm.weight": (config.linear_value_head_dim,),
    }


def gated_delta(weights: Mapping[str, Tensor], name: str, config: Any, x: Tensor, visible: Tensor) -> Tensor:
    """Return the heads' gated outputs [b, s, heads * d_v] of the normed stream x [b, s, h].

    `visible` [b, s, s]: whether a token (second axis) is of the document of an earlier one (third).
    """
    batch, length, _ = x.shape
    heads, shared = config.linear_num_value_heads, config.linear_num_value_heads // config.linear_num_key_heads

    def channels(which: str, width: int) -> Tensor:
        mixed = _convolution(
            linear(weights, f"{name}.{which}_proj", x), weights[f"{name}.{which}_conv.weight"], visible
        )
        return (mixed * torch.sigmoid(mixed)).reshape(batch, length, -1, width)

    query, key = (channels(which, config.linear_key_head_dim) for which in ("q", "k"))
    value = channels("v", config.linear_value_head_dim)
    query, key = (one / torch.sqrt((one * one).sum(-1, keepdim=True) + 1e-6) for one in (query, key))
    strength = torch.sigmoid(linear(weights, f"{name}.b_proj", x))
    steps = torch.log1p(torch.exp(linear(weights, f"{name}.a_proj", x) + weights[f"{name}.dt_bias"]))
    kept = torch.exp(-torch.exp(weights[f"{name}.A_log"]) * steps)

    outputs = []
    for head in range(heads):
        q, k, v = query[:, :, head // shared], key[:, :, head // shared], value[:, :, head]
        matrix = x.new_zeros(batch, k.shape[-1], v.shape[-1])
        rows = []
        for t in range(length):
            continues = visible[:, t, t - 1].to(x.dtype) if t > 0 else x.new_zeros(batch)
            matrix = matrix * (continues * kept[:, t, head])[:, None, None]
            predicted = torch.einsum("bkv,bk->bv", matrix, k[:, t])
            change = strength[:, t, head, None] * (v[:, t] - predicted)
            matrix = matrix + torch.einsum("bk,bv->bkv", k[:, t], change)
            rows.append(torch.einsum("bkv,bk->bv", matrix, q[:, t]) * k.shape[-1] ** -0.5)
        outputs.append(torch.stack(rows, dim=1))
    normed = rms_norm(torch.stack(outputs, dim=2), weights[f"{name}.norm.weight"], config.norm_epsilon)
    gate = linear(weights, f"{name}.gate_proj", x)
    return normed.flatten(2) * gate * torch.sigmoid(gate)


def _convolution(x: Tensor, filters: Tensor, visible: Tensor) -> Tensor:
    """Return for each token the weighted sum of it and of the tokens before it in its document, [b, s, channels]."""
    kernel = filters.shape[1]
    mixed = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for back in range(min(kernel, t + 1)):
            seen = visible[:, t, t - back, None].to(x.dtype)
            mixed[:, t] += seen * x[:, t - back] * filters[:, kernel - 1 - back]
    return mixed


def delta_slice(config: Any, rank: int, ranks: int, part: str, weight: Tensor) -> Tensor:
    """Return the slice of a weight with the heads of one of so many ranks."""
    heads = config.linear_num_value_heads
    values = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    keys = sorted({head // (heads // config.linear_num_key_heads) for head in values})
    if part == "norm":
        return weight
    numbers: Sequence[int] = values
    width = config.linear_value_head_dim
    if part in ("q_proj", "k_proj", "q_conv", "k_conv"):
        numbers = keys
        width = config.linear_key_head_dim
    elif part in ("b_proj", "a_proj", "A_log", "dt_bias"):
        width = 1
    elements = torch.tensor([head * width + i for head in numbers for i in range(width)])
    return weight[:, elements] if part == "o_proj" else weight[elements]
