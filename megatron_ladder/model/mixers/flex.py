"""Attention with sinks on CUDA: the kernels of FlexAttention, compiled for a mask that skips what no query sees."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from megatron_ladder.model.documents import DocumentBounds


def visible_blocks(
    batch: int,
    length: int,
    documents: DocumentBounds | None,
    window: int,
    device: torch.device,
    create: Callable[..., BlockMask] | None = None,
) -> BlockMask:
    """Return which keys the queries of rows of one length see: of their document, and at most `window` of them.

    `create` makes the mask of a function; by default, compiled code of torch.
    """
    numbers: Tensor | None = None
    if documents is not None:
        places = torch.arange(batch * length, device=device)
        numbers = torch.bucketize(places, documents.bounds[1:], right=True).view(batch, length)

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = key <= query
        if window:
            visible = visible & (key > query - window)
        if numbers is not None:
            visible = visible & (numbers[row, key] == numbers[row, query])
        return visible

    rows = None if documents is None else batch
    return (create or _compiled(create_block_mask))(is_visible, rows, None, length, length, device=device)


def attend_to_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: BlockMask,
    scale: float,
    sinks: Tensor,
    attend: Callable[..., Any] | None = None,
) -> Tensor:
    """Attend with sinks [heads]: q [b, heads, s, d], k and v [b, kv_heads, s, d] -> [b, heads, s, d].

    `attend` is `flex_attention`; by default compiled.
    """
    options = {"block_mask": blocks, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    attended, more = (attend or _compiled(flex_attention))(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return (attended * torch.sigmoid(more.lse - sinks.unsqueeze(1)).unsqueeze(-1)).to(v.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
