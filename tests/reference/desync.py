"""Desync residual in one process: simulates every tensor-parallel rank with its slices and a separate stream."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference.delta import delta_slice

SubBlock = Callable[[Tensor], Tensor]
"""h_i with the slices of one rank: a stream [b, s, h] -> the rank's partial sum."""


def is_reduced(config: Any, sub_block: int) -> bool:
    """Return whether the ranks' streams are summed after this sub-block of the model; -1 is the embedding."""
    return (sub_block + 1) % config.desync_interval == 0 or sub_block + 1 == 2 * config.num_layers


def rank_weights(weights: Mapping[str, Tensor], config: Any, rank: int) -> dict[str, Tensor]:
    """Return this rank's slices of the layers' weights, for sub-blocks with its heads only."""
    d, ranks, value = config.head_dim, config.desync_tp, config.value_width
    heads = range(rank * config.num_attention_heads // ranks, (rank + 1) * config.num_attention_heads // ranks)
    group = config.num_attention_heads // config.num_key_value_heads
    kv_heads = sorted({head // group for head in heads})

    def of_heads(numbers: Sequence[int], width: int) -> Tensor:
        return torch.tensor([head * width + i for head in numbers for i in range(width)])

    of_query, of_kv, of_value = of_heads(heads, d), of_heads(kv_heads, d), of_heads(heads, value)
    of_expanded = of_heads(heads, config.qk_nope_head_dim + value)
    of_ffn = torch.arange(config.ffn_hidden_size).chunk(ranks)[rank]
    rows = {"q_proj": of_query, "k_proj": of_kv, "v_proj": of_kv, "q_b_proj": of_query, "kv_b_proj": of_expanded}
    rows |= {"attention.gate_proj": of_value, "mlp.gate_proj": of_ffn, "up_proj": of_ffn}
    columns = {"o_proj": of_value, "down_proj": of_ffn}
    sliced = {}
    for name, weight in weights.items():
        *_, parent, module, kind = ("", *name.split("."))
        layer, _, part = name.removeprefix("layers.").partition(".attention.")
        if part and int(layer) in config.linear_attention_layers:
            sliced[name] = delta_slice(config, rank, ranks, part.removesuffix(".weight"), weight)
            continue
        module = f"{parent}.{module}" if module == "gate_proj" else module
        if kind == "sinks":
            weight = weight[torch.tensor(heads)]
        elif module in rows:
            weight = weight[rows[module]]
        elif module in columns and kind == "weight":
            weight = weight[:, columns[module]]
        elif module in columns and rank > 0:
            weight = torch.zeros_like(weight)
        elif weight.dim() == 2 and module in ("attention_norm", "mlp_norm"):
            weight = weight[rank]
        sliced[name] = weight
    return sliced


def desync_stream(config: Any, stream: Tensor, ranks: Sequence[Sequence[SubBlock]]) -> Tensor:
    """Return the stream after the last layer; `ranks` has the sub-blocks of all layers for each rank."""
    streams = [stream] * len(ranks)
    for index, sub_blocks in enumerate(zip(*ranks, strict=True)):
        partial = [sub_block(own) for sub_block, own in zip(sub_blocks, streams, strict=True)]
        if is_reduced(config, index):
            total = sum(y + own / len(ranks) for y, own in zip(partial, streams, strict=True))
            assert isinstance(total, Tensor)
            streams = [total] * len(ranks)
        else:
            streams = [own + y for y, own in zip(partial, streams, strict=True)]
    return streams[0]
