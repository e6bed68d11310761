"""Attention of decode steps, compared with torch's."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ladder.generate import attention
from megatron_ladder.generate.attention import CachedRows, counts_filled_columns


@pytest.mark.parametrize("at_once", [1, 1000, 1 << 17])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_cached_rows_attend_as_torch_does(
    kv_heads: int, masked: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four slots, seven of nine columns, and samples that have filled one, four and seven of them."""
    monkeypatch.setattr(attention, "_PRODUCTS_AT_ONCE", at_once)
    keys, values = torch.randn(2, 4, kv_heads, 9, 8, dtype=torch.float64)
    q = torch.randn(3, 1, 6, 8, dtype=torch.float64).transpose(1, 2)
    filled = torch.tensor([1, 4, 7] if masked else [7, 7, 7])
    mask = (torch.arange(7) < filled.unsqueeze(1))[:, None, None, :] if masked else None
    first_rows = torch.arange(0, 4 * kv_heads * 9, 9).view(4, kv_heads)[:3]
    found = CachedRows.of(first_rows, 7, 6).attend(q, keys[:3], values[:3], mask)
    for sample, columns in enumerate(filled.tolist()):
        own = (each[sample, :, :columns].repeat_interleave(6 // kv_heads, dim=0) for each in (keys, values))
        torch.testing.assert_close(found[sample], F.scaled_dot_product_attention(q[sample], *own))


def test_a_cache_of_another_dtype_keeps_the_dtype_of_the_queries() -> None:
    keys, values = torch.randn(2, 2, 3, 5, 8)
    q = torch.randn(2, 3, 1, 8).bfloat16()
    found = CachedRows.of(torch.arange(0, 30, 5).view(2, 3), 5, 3).attend(q, keys, values, None)
    expected = F.scaled_dot_product_attention(q.float(), keys, values)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.bfloat16())


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "counts"),
    [
        (torch.bfloat16, 128, (9, 0), True),
        (torch.float16, 64, (8, 0), True),
        (torch.float32, 128, (9, 0), False),
        (torch.bfloat16, 320, (9, 0), False),
        (torch.bfloat16, 100, (9, 0), False),
        (torch.float16, 64, (7, 5), False),
    ],
)
def test_only_devices_with_the_kernel_count_filled_columns(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert counts_filled_columns(dtype, head_dim, torch.device("cuda")) == counts
    assert not counts_filled_columns(dtype, head_dim, torch.device("cpu"))
