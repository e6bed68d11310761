"""Weights in oneDNN's layout."""

import pytest
import torch

from megatron_ladder.generate.loading import PACKED_OPERATIONS
from megatron_ladder.torch_private import can_pack
from tests.unit.generate.tiny_model import reference_of, tiny_config, tiny_model

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not can_pack(dtype), reason="oneDNN has no such product here"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_multiply_as_exactly_as_others(dtype: torch.dtype) -> None:
    """For odd sizes, one row and several rows, and inputs that are not contiguous."""
    weight = torch.randn(131, 70).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    bias = torch.randn(131).to(dtype)
    contiguous = [torch.randn(*shape, 70) for shape in ((2, 3), (1, 1), (0, 1))]
    for rows in [x.to(dtype) for x in (*contiguous, torch.randn(70, 4, 3).permute(1, 2, 0))]:
        expected = rows.double() @ weight.double().t() + bias.double()
        found = PACKED_OPERATIONS.linear(rows, packed, bias)
        assert found.shape == expected.shape and found.dtype == dtype
        if len(rows) > 0:
            assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_products_of_a_dtype_its_weights_stay(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: dtype != torch.float32)
    model = tiny_model(tiny_config(), reference_of(tiny_config())[0], packed=True, dtype=dtype)
    assert not any(weight.is_mkldnn for weight in model.parameters())
