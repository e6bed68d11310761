"""Attention in generation, compared with torch's and with the heads in training."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ladder.generate import attention
from megatron_ladder.generate.attention import CachedRows, counts_filled_columns, split_heads_in_fp32
from megatron_ladder.model.operations import Operations
from megatron_ladder.model.rotary import RotaryTable


@pytest.mark.parametrize("few", [0, 1 << 17])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("columns", [9, 14])
def test_cached_rows_attend_as_torch_does(
    columns: int, kv_heads: int, masked: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four slots, and samples that have filled one, four and seven columns."""
    monkeypatch.setattr(attention, "_FEW_PRODUCTS", few)
    keys, values = torch.randn(2, 4, kv_heads, columns, 8, dtype=torch.float64)
    q = torch.randn(3, 1, 6, 8, dtype=torch.float64).transpose(1, 2)
    filled = torch.tensor([1, 4, 7] if masked else [7, 7, 7])
    mask = (torch.arange(7) < filled.unsqueeze(1))[:, None, None, :] if masked else None
    first_rows = torch.arange(0, 4 * kv_heads * columns, columns).view(4, kv_heads)[:3]
    found = CachedRows.of(first_rows, 7, 6).attend(q, keys[:3], values[:3], mask)
    for sample, columns in enumerate(filled.tolist()):
        own = (each[sample, :, :columns].repeat_interleave(6 // kv_heads, dim=0) for each in (keys, values))
        torch.testing.assert_close(found[sample], F.scaled_dot_product_attention(q[sample], *own))


@pytest.mark.parametrize("few", [0, 1 << 17])
def test_a_cache_of_another_dtype_keeps_the_dtype_of_the_queries(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_FEW_PRODUCTS", few)
    keys, values = torch.randn(2, 2, 3, 5, 8)
    q = torch.randn(2, 3, 1, 8).bfloat16()
    found = CachedRows.of(torch.arange(0, 30, 5).view(2, 3), 5, 3).attend(q, keys, values, None)
    expected = F.scaled_dot_product_attention(q.float(), keys, values)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.bfloat16())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_heads_are_split_as_in_training(dtype: torch.dtype, normed: bool) -> None:
    """Four query heads and two key-value heads of width 6, for two positions of two samples."""
    projected = torch.randn(2, 2, (4 + 2 + 2) * 6, dtype=dtype)
    angles = torch.randn(2, 2, 1, 3, dtype=torch.promote_types(dtype, torch.float32)).repeat(1, 1, 1, 2)
    table = RotaryTable(angles.cos(), angles.sin())
    weights = tuple(torch.rand(2, 6, dtype=dtype)) if normed else None
    found = split_heads_in_fp32(projected, (24, 12, 12), 6, table, weights, 1e-5)
    assert {each.dtype for each in found} == {angles.dtype}
    norm_weights = None if weights is None else tuple(weight.to(angles.dtype) for weight in weights)
    expected = Operations.split_heads(projected.to(angles.dtype), (24, 12, 12), 6, table, norm_weights, 1e-5)
    torch.testing.assert_close(found, expected)


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
