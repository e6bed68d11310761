"""Causal attention in which a token attends only within its document, without a mask of [s, s].

The rows of a batch are cut at the beginnings of documents, and each piece attends to itself, which is less work than
one pass over the whole row. On CUDA in half precision, one kernel processes all pieces at once; elsewhere they are
processed one after another. With sinks, the kernels on CUDA are those of FlexAttention, compiled for a mask that skips
blocks of keys which no query sees.

Layouts: queries, keys and values [b, heads, s, d]; packed ones [b * s, heads, d], row after row.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from megatron_ladder.comm.group import to_device
from megatron_ladder.model.flash_attention import flash_attention
from megatron_ladder.model.windows import attend_causally


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


PackedAttention = Callable[[Tensor, Tensor, Tensor, DocumentBounds, float, int], Tensor]
"""(packed queries, keys, values, documents, scale, window) -> packed outputs."""


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: DocumentBounds | None,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    packed: PackedAttention | None = None,
) -> Tensor:
    """Attend within documents: q [b, heads, s, d], k and v [b, kv_heads, s, d] -> [b, heads, s, d].

    `scale` multiplies the scores. Without documents each row is one. `window` and `sinks`: see `windows.py`. `packed`
    computes all documents at once; by default torch's kernel on CUDA in half precision, which needs values as wide as
    keys and no sinks, and none elsewhere.
    """
    fits = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] == v.shape[3]
    if packed is None and fits and sinks is None:
        packed = _flash_attention
    batch, _, length, _ = q.shape
    if packed is None:
        attend = partial(attend_causally, scale=scale, window=window, sinks=sinks)
        if documents is None:
            return attend(q, k, v)
        of_rows = zip(q, k, v, _lengths_of_rows(documents.lengths, length), strict=True)
        return torch.cat([_attend_row(attend, row, lengths) for *row, lengths in of_rows])
    if documents is None:
        bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q.device)
        documents = DocumentBounds((length,) * batch, bounds)
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    attended = packed(flat_q, flat_k, flat_v, documents, scale, window)
    return attended.view(batch, length, q.shape[1], q.shape[3]).transpose(1, 2)


def _lengths_of_rows(lengths: Sequence[int], row: int) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    for length in lengths:
        if sum(rows[-1]) == row:
            rows.append([])
        rows[-1].append(length)
    assert all(sum(row_lengths) == row for row_lengths in rows), "documents end where rows end"
    return rows


def _attend_row(attend: Callable[..., Tensor], row: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Attend within the documents of one row: queries, keys and values [heads, s, d] -> [1, heads, s, d]."""
    pieces = zip(*(x.unsqueeze(0).split(list(lengths), dim=2) for x in row), strict=True)
    return torch.cat([attend(*piece) for piece in pieces], dim=2)


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, documents: DocumentBounds, scale: float, window: int) -> Tensor:
    longest = max(documents.lengths)
    bounds = documents.bounds
    return flash_attention(q, k, v, bounds, bounds, longest, longest, scale, is_causal=True, window=window)[0]


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
    # Another kernel, for few queries, needs groups of heads that are a power of two.
    options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    attended, more = (attend or _compiled(flex_attention))(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return (attended * torch.sigmoid(more.lse - sinks.unsqueeze(1)).unsqueeze(-1)).to(v.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
