"""Attention in generation where torch's own is slow: in half precision on CPUs, and to a static cache on GPUs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.model.operations import Operations
from megatron_ladder.model.rotary import RotaryTable

_LARGEST_FLASH_HEAD, _FIRST_FLASH_DEVICE = 256, (8, 0)
"""Limits of FlashAttention: the head's size, and the compute capability."""


def split_heads_in_fp32(
    projected: Tensor,
    widths: Sequence[int],
    head_dim: int,
    table: RotaryTable,
    norm_weights: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Operations.split_heads`; the result is in fp32, in which attention on CPUs is several times as fast."""
    wide = projected.to(torch.promote_types(projected.dtype, torch.float32))
    weights = None if norm_weights is None else (norm_weights[0].to(wide.dtype), norm_weights[1].to(wide.dtype))
    return Operations.split_heads(wide, widths, head_dim, table, weights, epsilon)


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
