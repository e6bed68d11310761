"""Gradients of weights that are added to a sum in fp32 instead of going through autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine import sharded
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.weight_gradient import add_product
from tests.helpers.sharded import small_model


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("replace", [False, True])
def test_the_sum_is_wider_than_the_product(replace: bool) -> None:
    a, b = numbers(5, 7), numbers(7, 3)
    total = torch.full((5, 3), torch.nan if replace else 1000.0)
    add_product(total, a, b, replace)
    torch.testing.assert_close(total, (a @ b).float() + (0.0 if replace else 1000.0), rtol=0, atol=0)


class Calls(TorchDispatchMode):
    """Records operations other than views, with their named arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.found.append((function, kwargs))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("replace", [False, True])
def test_another_device_than_a_cpu_adds_in_one_operation(replace: bool) -> None:
    total = torch.empty(5, 3, device="meta")
    with Calls() as calls:
        add_product(total, numbers(5, 7).to("meta"), numbers(7, 3).to("meta"), replace)
    ((function, named),) = calls.found[-1:]
    assert function is torch.ops.aten.addmm.dtype_out and named["out"] is total
    assert named.get("beta", 1) == (0 if replace else 1)


@pytest.mark.parametrize("biases", [False, True])
def test_layers_add_their_products(monkeypatch: pytest.MonkeyPatch, biases: bool) -> None:
    """The same numbers as those of autograd, bit for bit: a CPU rounds a product before it is added."""
    config = small_model(num_layers=2, add_mlp_bias=biases, add_qkv_bias=biases)
    models = [LanguageModel(config, ProcessMesh.single(), StackOptions(), seed=1).bfloat16() for _ in range(2)]
    model, plain = models
    ids = torch.randint(0, 100, (2, 2, 13), generator=torch.Generator().manual_seed(0))
    sums: dict[str, Tensor] = {}
    for batch in ids:
        plain(batch[:, :-1], batch[:, 1:]).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            sums[name] = parameter.grad.float() + sums.get(name, 0.0)
            parameter.grad = None
    added: list[bool] = []

    def counted(total: Tensor, a: Tensor, b: Tensor, replace: bool) -> None:
        added.append(replace)
        add_product(total, a, b, replace)

    monkeypatch.setattr(sharded, "add_product", counted)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors}]
    optimizer = ShardedOptimizer(model, groups, ProcessMesh.single(), torch.bfloat16, bucket_numbers=5000)
    with optimizer.reducing(len(ids)):
        for batch in ids:
            model(batch[:, :-1], batch[:, 1:]).backward()
    # All matrices but those of the embedding and the head.
    assert added == [True] * 8 + [False] * 8
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(optimizer._sums[parameter][1], sums[name], rtol=0, atol=0)
