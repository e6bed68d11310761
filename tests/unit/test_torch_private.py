"""What happens with a torch that lacks a private part."""

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megatron_ladder import torch_private
from megatron_ladder.torch_private import can_pack, has_nvlink, run_backward


@pytest.mark.parametrize("has_engine", [True, False])
def test_backward_accumulates_gradients(has_engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_engine:
        monkeypatch.setattr(torch_private, "_execution_engine", None)
    x = torch.ones(2, requires_grad=True)
    for factor in (2.0, 3.0):
        run_backward((get_gradient_edge(x * factor), get_gradient_edge(x + 1)), (torch.ones(2), torch.tensor([1.0, 0])))
    assert x.grad is not None and x.grad.tolist() == [7, 5]


def test_packed_products_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacking:
        _reorder_linear_weight = _is_mkldnn_bf16_supported = _is_mkldnn_fp16_supported = lambda: True

    monkeypatch.setattr(torch.ops, "mkldnn", Lacking())
    assert not any(map(can_pack, (torch.float32, torch.bfloat16)))
    assert not can_pack(torch.float64)


def test_nvlink_cannot_be_detected_by_every_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._distributed_c10d, "_detect_dma_connectivity")
    with pytest.raises(AttributeError, match="_detect_dma_connectivity"):
        has_nvlink(0, 1)
