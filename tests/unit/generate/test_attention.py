"""Attention in generation, compared with torch's and with the heads in training."""

import pytest
import torch

from megatron_ladder.generate.attention import counts_filled_columns, split_heads_in_fp32
from megatron_ladder.model.operations import Operations
from megatron_ladder.model.rotary import RotaryTable


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
