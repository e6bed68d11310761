"""Causal attention in which a token sees only its own document, without a mask of [s, s].

The rows of a batch are cut where documents begin, and each piece attends to itself: less work than one pass over the
row, not more. On CUDA, in half precision, one kernel takes all pieces at once; elsewhere they follow one another.

Layouts: queries, keys and values [b, heads, s, d]; `packed` ones [b * s, heads, d], row after row.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PackedAttention = Callable[[Tensor, Tensor, Tensor, "Documents"], Tensor]
"""Packed queries, keys and values -> what the queries found, packed."""


class Documents(NamedTuple):
    """The pieces of the rows of a batch that see only themselves. Every row begins one."""

    lengths: tuple[int, ...]
    """Tokens of each, in the order of the rows; their sum is b * s."""
    bounds: Tensor
    """[documents + 1] int32, on the computing device: where each begins among the b * s tokens, and their end."""

    @staticmethod
    def of(bounds: Tensor, device: torch.device) -> "Documents":
        """`bounds` [documents + 1] int32 on the CPU, so that no device is waited for."""
        ends: list[int] = bounds.tolist()
        return Documents(tuple(end - begin for begin, end in pairwise(ends)), bounds.to(device, non_blocking=True))


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, packed: PackedAttention | None = None
) -> Tensor:
    """Queries [b, heads, s, d] with keys and values [b, kv_heads, s, d] -> what they found, [b, heads, s, d].

    Args:
        packed: computes all documents at once; that of torch for CUDA where it can serve, if not given.
    """
    if packed is None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        packed = flash_attention
    if packed is None:
        return torch.cat(list(map(_one_row, q, k, v, _lengths_of_rows(documents.lengths, q.shape[2]))))
    batch, _, length, _ = q.shape
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return packed(flat_q, flat_k, flat_v, documents).view(batch, length, q.shape[1], q.shape[3]).transpose(1, 2)


def _lengths_of_rows(lengths: Sequence[int], row: int) -> list[list[int]]:
    """Lengths of the documents of each row of `row` tokens."""
    rows: list[list[int]] = [[]]
    for length in lengths:
        if sum(rows[-1]) == row:
            rows.append([])
        rows[-1].append(length)
    assert all(sum(row_lengths) == row for row_lengths in rows), "documents end where rows end"
    return rows


def _one_row(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """[heads, s, d] each -> [1, heads, s, d]."""
    of_q, of_k, of_v = (x.unsqueeze(0).split(list(lengths), dim=2) for x in (q, k, v))
    shared = q.shape[0] != k.shape[0]
    found = [
        F.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=shared)
        for piece in zip(of_q, of_k, of_v, strict=True)
    ]
    return torch.cat(found, dim=2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """torch's FlashAttention over packed documents; fp16 or bf16 on CUDA."""
    # Importing it loads torch's compiler, which takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    longest = max(documents.lengths)
    found = varlen_attn(
        q, k, v, documents.bounds, documents.bounds, longest, longest,
        window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found
