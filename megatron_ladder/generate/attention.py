"""Attention in generation, where torch's own is slow: to prompts in half precision on CPUs, and to a static cache.

The classes are for decode steps, with one query per sample: q [b, heads/t, 1, d], and all columns of the cache (see
`slots.py`) as k and v [b, kv_heads/t, positions, d]. An object of them serves all layers of a step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.model.operations import Operations
from megatron_ladder.model.rotary import RotaryTable

_LARGEST_FLASH_HEAD, _FIRST_FLASH_DEVICE = 256, (8, 0)
"""Limits of FlashAttention: the head's size, and the compute capability."""
_FEW_PRODUCTS = 1 << 17
"""Numbers of cached keys times heads that share one, up to which torch's attention is faster than `CachedRows`."""


def split_heads_in_fp32(
    projected: Tensor,
    widths: Sequence[int],
    head_dim: int,
    table: RotaryTable,
    norm_weights: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Operations.split_heads`; the result is in fp32, in which attention on CPUs is several times as fast.

    Queries and keys, which are next to each other, are rotated together, with few operations for the sake of one token.
    """
    heads = projected.to(torch.promote_types(projected.dtype, torch.float32)).unflatten(-1, (-1, head_dim))
    queries, keys, values = (width // head_dim for width in widths)
    q_k, v = heads.split((queries + keys, values), dim=-2)
    if norm_weights is not None:
        q, k = q_k.split((queries, keys), dim=-2)
        pairs = zip((q, k), norm_weights, strict=True)
        q_k = torch.cat([F.rms_norm(x, (head_dim,), weight.to(x.dtype), epsilon) for x, weight in pairs], dim=-2)
    rotated = q_k * table.cos
    first, second = q_k.chunk(2, dim=-1)
    half = head_dim // 2
    rotated[..., :half].addcmul_(second, table.sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(first, table.sin[..., half:])
    turned = rotated.permute(1, 2, 0, 3)
    return turned[:, :queries], turned[:, queries:], v.permute(1, 2, 0, 3)


def counts_filled_columns(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Return whether torch has the kernel of `FilledColumns` for this device."""
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= _LARGEST_FLASH_HEAD
    return (
        fits
        and device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= _FIRST_FLASH_DEVICE
    )


class FilledColumns(NamedTuple):
    """Attention to the filled columns of each sample, by a kernel for GPUs that reads no others.

    Neither the shapes nor the values on the host change from token to token, so the call can be captured.
    """

    query_starts: Tensor
    """[b kv_heads/t + 1] int32: each key-value head of each sample is a sequence of one query."""
    key_starts: Tensor
    """[b kv_heads/t + 1] int32: its first row among the columns of all heads."""
    filled: Tensor
    """[b kv_heads/t] int32, the number of filled columns."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """See `Operations.attend`; there is no mask."""
        # Imported here because it loads torch's compiler, which takes seconds.
        from torch.nn.attention.varlen import varlen_attn

        kv_heads, positions, head_dim = k.shape[1:]
        attended = varlen_attn(
            q.reshape(-1, q.shape[1] // kv_heads, head_dim),
            k.reshape(-1, 1, head_dim),
            v.reshape(-1, 1, head_dim),
            self.query_starts,
            self.key_starts,
            1,
            positions,
            enable_gqa=True,
            seqused_k=self.filled,
        )
        assert isinstance(attended, Tensor)
        return attended.view(q.shape)


class CachedRows(NamedTuple):
    """Attention to the first columns, by operations of torch that read the cache at the memory's rate on a CPU.

    torch's attention reads a long cache at half of that rate. Here the output is a weighted sum of the cache's rows, as
    `embedding_bag` computes it.
    """

    rows: Tensor
    """[b heads/t, extent] int32: the rows that each head attends to, among the columns of all key-value heads."""

    @classmethod
    def of(cls, first_rows: Tensor, extent: int, heads: int) -> "CachedRows":
        """Return the attention of so many heads to columns that begin with the rows `first_rows` [b, kv_heads/t]."""
        rows = first_rows.unsqueeze(-1) + torch.arange(extent)
        return cls(rows.repeat_interleave(heads // first_rows.shape[1], dim=1).flatten(0, 1).int())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """See `Operations.attend`; the cache has another dtype than q if that is not fast on CPUs."""
        (samples, heads, _, head_dim), kv_heads, extent = q.shape, k.shape[1], self.rows.shape[1]
        wide = q.to(k.dtype)
        if q.numel() * extent <= _FEW_PRODUCTS:
            return Operations.attend(wide, k.narrow(2, 0, extent), v.narrow(2, 0, extent), mask).to(q.dtype)
        queries = (wide * head_dim**-0.5).reshape(samples, kv_heads, -1, head_dim)
        # Keys of several heads without a gap between them are read up to twice as fast.
        read = k.shape[2] if k.shape[2] < 2 * extent else extent
        # The other order of the factors is a slower product.
        scores = (k.narrow(2, 0, read) @ queries.transpose(-1, -2)).transpose(-1, -2).narrow(-1, 0, extent)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = scores.softmax(-1).reshape(samples * heads, extent)
        attended = F.embedding_bag(self.rows, v.flatten(0, 2), mode="sum", per_sample_weights=weights)
        return attended.view(q.shape).to(q.dtype)


def attend_by_sums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """See `Operations.attend`; for one query and no mask, by operations that torch.compile fuses into few kernels."""
    queries = q.reshape(*k.shape[:2], -1, 1, q.shape[3]).to(k.dtype)
    weights = ((queries * k.unsqueeze(2)).sum(-1) * q.shape[3] ** -0.5).softmax(-1)
    return (weights.unsqueeze(-1) * v.unsqueeze(2)).sum(-2).reshape(q.shape).to(q.dtype)
