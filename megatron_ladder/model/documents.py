"""Causal attention in which a token attends only within its document, without a mask of [s, s].

The rows of a batch are cut at the beginnings of documents, and each piece attends to itself, which is less work than
one pass over the whole row. On CUDA in half precision, one kernel processes all pieces at once; elsewhere they are
processed one after another.

Layouts: queries, keys and values [b, heads, s, d]; packed ones [b * s, heads, d], row after row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.comm.group import to_device
from megatron_ladder.model.flash_attention import flash_attention


class DocumentBounds(NamedTuple):
    """The documents of the rows of a batch. Every row begins one."""

    lengths: tuple[int, ...]
    """Tokens of each document, in the order of the rows; their sum is b * s."""
    bounds: Tensor
    """[documents + 1] int32, on the computing device: the start of each document among the b * s tokens, and b * s."""

    @staticmethod
    def of(bounds: Tensor, device: torch.device) -> "DocumentBounds":
        """Take `bounds` [documents + 1] int32 from the CPU, so that no device has to be synchronised."""
        ends: list[int] = bounds.tolist()
        lengths = tuple(end - begin for begin, end in pairwise(ends))
        return DocumentBounds(lengths, to_device(bounds, device))


PackedAttention = Callable[[Tensor, Tensor, Tensor, DocumentBounds, float], Tensor]
"""(packed queries, keys, values, documents, scale) -> packed outputs."""


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: DocumentBounds, scale: float, packed: PackedAttention | None = None
) -> Tensor:
    """Attend within documents: q [b, heads, s, d], k and v [b, kv_heads, s, d] -> [b, heads, s, d].

    `scale` multiplies the scores. `packed` computes all documents at once; by default torch's kernel on CUDA in half
    precision, which needs values as wide as keys, and none elsewhere.
    """
    if packed is None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] == v.shape[3]:
        packed = _flash_attention
    if packed is None:
        attend = partial(_attend_row, scale=scale)
        return torch.cat(list(map(attend, q, k, v, _lengths_of_rows(documents.lengths, q.shape[2]))))
    batch, _, length, _ = q.shape
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    attended = packed(flat_q, flat_k, flat_v, documents, scale)
    return attended.view(batch, length, q.shape[1], q.shape[3]).transpose(1, 2)


def _lengths_of_rows(lengths: Sequence[int], row: int) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    for length in lengths:
        if sum(rows[-1]) == row:
            rows.append([])
        rows[-1].append(length)
    assert all(sum(row_lengths) == row for row_lengths in rows), "documents end where rows end"
    return rows


def _attend_row(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Attend within the documents of one row: [heads, s, d] each -> [1, heads, s, d]."""
    pieces = zip(*(x.unsqueeze(0).split(list(lengths), dim=2) for x in (q, k, v)), strict=True)
    is_grouped = q.shape[0] != k.shape[0]
    attended = [
        F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
        for query, key, value in pieces
    ]
    return torch.cat(attended, dim=2)


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, documents: DocumentBounds, scale: float) -> Tensor:
    longest = max(documents.lengths)
    return flash_attention(q, k, v, documents.bounds, documents.bounds, longest, longest, scale, is_causal=True)
