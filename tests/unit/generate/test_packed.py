"""Weights in oneDNN's layout."""

import pytest
import torch

from megatron_ladder.generate.loading import PACKED_OPERATIONS, _can_pack
from tests.unit.generate.tiny_model import reference_of, tiny_config, tiny_model

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not _can_pack(dtype), reason="oneDNN has no such product here"))
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


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_products_of_a_dtype_its_weights_stay(
    dtype: torch.dtype, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: supported)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: supported)
    config = tiny_config()
    weights = reference_of(config)[0]
    model = tiny_model(config, weights, packed=True, dtype=dtype)
    plain = tiny_model(config, weights, dtype=dtype)
    for (name, weight), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert weight.is_mkldnn == (supported and ("proj.weight" in name or name == "lm_head.weight")), name
        assert torch.equal(weight.to_dense() if weight.is_mkldnn else weight, expected), name
