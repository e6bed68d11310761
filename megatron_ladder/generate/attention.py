"""Attention in generation, where torch's own is slow: to prompts in half precision on CPUs, and to a static cache.

The classes are for decode steps, with one query per sample: q [b, heads/t, 1, d], and all columns of the cache (see
`slots.py`) as k and v [b, kv_heads/t, positions, d]. An object of them serves all layers of a step.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ladder.model.operations import Operations

_LARGEST_FLASH_HEAD, _FIRST_FLASH_DEVICE = 256, (8, 0)
"""Limits of FlashAttention: the head's size, and the compute capability."""
_PRODUCTS_AT_ONCE = 1 << 17
"""Numbers that `CachedRows` multiplies before it sums them; half a megabyte stays in the cache of a core."""


def attend_in_fp32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """See `Operations.attend`. torch's attention on CPUs takes several times as long in bf16 and fp16."""
    return Operations.attend(q.float(), k.float(), v.float(), mask).to(q.dtype)


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
            q.reshape(-1, q.shape[1] // kv_heads, head_dim), k.reshape(-1, 1, head_dim), v.reshape(-1, 1, head_dim),
            self.query_starts, self.key_starts, 1, positions, enable_gqa=True, seqused_k=self.filled,
        )  # fmt: skip
        assert isinstance(attended, Tensor)
        return attended.view(q.shape)


class CachedRows(NamedTuple):
    """Attention to the first columns, by operations of torch that read the cache at the memory's rate on a CPU.

    torch's attention multiplies a matrix of one row for each head, at a third of that rate. Here the scores of all
    heads are one product and sum, and the output is a weighted sum of the cache's rows, as `embedding_bag` computes it.
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
        queries = (q.to(k.dtype) * head_dim**-0.5).reshape(samples, kv_heads, -1, head_dim)
        scores = _scores(queries, k.narrow(2, 0, extent))
        if mask is not None:
            scores = scores.masked_fill_(~mask, float("-inf"))
        weights = scores.softmax(-1).view(samples * heads, extent)
        attended = F.embedding_bag(self.rows, v.flatten(0, 2), mode="sum", per_sample_weights=weights)
        return attended.view(q.shape).to(q.dtype)


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply queries [b, kv_heads/t, heads of one key, d] with keys [b, kv_heads/t, columns, d]."""
    samples, kv_heads, shared_by, _ = queries.shape
    if shared_by > 1:
        return queries @ keys.transpose(-1, -2)
    scores = queries.new_empty(samples, kv_heads, 1, keys.shape[2])
    at_once = max(1, _PRODUCTS_AT_ONCE // keys[0].numel())
    for part in (slice(begin, begin + at_once) for begin in range(0, samples, at_once)):
        torch.sum(queries[part] * keys[part], -1, out=scores[part, :, 0])
    return scores
