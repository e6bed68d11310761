"""The sum of an input's gradient starts before the weight's gradient; gradients of weights are added at once."""

import functools
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.comm.stream import StreamLayout, copy_to_tensor_parallel_region
from megatron_ladder.engine import sharded
from megatron_ladder.engine.sharded import ShardedOptimizer
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.parallel.products import GradientSink, InputGradient, add_product, linear
from tests.helpers.recording import Calls
from tests.helpers.sharded import small_model


class DoublingGroup(CommGroup):
    """Two ranks that hold the same numbers, so a sum doubles them; records launches and waits."""

    def __init__(self, events: list[str]) -> None:
        super().__init__([0, 1], 0, None)
        self.events = events

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return InFlight(tensor, self.start_all_reduce(tensor)).wait()

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        self.events.append("start")
        return Mock(wait=lambda: (self.events.append("wait"), tensor.mul_(2)))


@pytest.mark.parametrize("summed", [False, True], ids=["autograd", "summed elsewhere"])
def test_the_sum_starts_between_the_two_products(summed: bool) -> None:
    events, found = list[str](), list[Tensor]()
    group = DoublingGroup(events)
    input_gradient = InputGradient(StreamLayout(group).start_write)
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((3, 2, 4), (5, 4)))
    sink = GradientSink()
    if summed:
        sink.add = lambda _, a, b: found.append(a @ b)
    output = linear(x, weight, None, input_gradient, sink=sink)
    with Calls(lambda function, _: "mm" in str(function) and events.append("product")):
        output.backward(torch.randn_like(output))
    assert events == ["product", "start", "product"]
    assert x.grad is None and (weight.grad is None) == summed == (len(found) == 1)


def test_products_wait_until_the_sink_catches_up() -> None:
    sink = GradientSink()
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    output = linear(x, weight, None, sink=sink)
    gradient, expected = torch.randn_like(output), x.detach()
    hides = False
    with sink.deferring(lambda: hides):
        output.backward(gradient)
        assert weight.grad is None
        assert x.grad is not None
        sink.catch_up()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, gradient.t() @ expected)
        linear(x, weight, None, sink=sink).backward(gradient)
        torch.testing.assert_close(weight.grad, gradient.t() @ expected)
        hides = True
        linear(x, weight, None, sink=sink).backward(gradient)
        torch.testing.assert_close(weight.grad, 2 * gradient.t() @ expected)
    torch.testing.assert_close(weight.grad, 3 * gradient.t() @ expected)
    linear(x, weight, None, sink=sink).backward(gradient)
    torch.testing.assert_close(weight.grad, 4 * gradient.t() @ expected)


def test_no_product_is_kept_for_more_than_two_steps() -> None:
    sink, weight, computed = GradientSink(), torch.randn(5, 4, requires_grad=True), list[int]()

    def product(number: int) -> Tensor:
        computed.append(number)
        return torch.zeros(5, 4)

    with sink.deferring(lambda: False):
        for number in range(3):
            sink.take(weight, functools.partial(product, number))
            sink.step()
            assert computed == [*range(number)]
    assert computed == [0, 1, 2]


def test_late_gradients_are_not_copied() -> None:
    sink, weight = GradientSink(), torch.randn(5, 4, requires_grad=True)
    addresses = list[int]()

    def product() -> Tensor:
        gradient = torch.randn(5, 4)
        addresses.append(gradient.data_ptr())
        return gradient

    with sink.deferring(lambda: False):
        assert sink.take(weight, product) is None
    assert weight.grad is not None
    assert [weight.grad.data_ptr()] == addresses


def test_input_that_is_not_kept_comes_from_the_walk() -> None:
    group = DoublingGroup([])
    launch = StreamLayout(group).start_write
    input_gradient = InputGradient(launch, keeps_input=False)
    x, weight = torch.randn(3, 2, 4), torch.randn(5, 4, requires_grad=True)
    output = linear(x, weight, None, input_gradient)
    again = x.clone()
    x.zero_()
    input_gradient.input_again = InFlight(again, None)
    output.sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, again.sum((0, 1)).expand(5, 4))


def test_sums_of_gradients_leave_the_incoming_gradient_unchanged() -> None:
    leaf, gradient = torch.zeros(4, 1, requires_grad=True), torch.ones(4, 1)
    copy_to_tensor_parallel_region(leaf, DoublingGroup([])).backward(gradient)
    assert leaf.grad is not None and leaf.grad.flatten().tolist() == [2, 2, 2, 2]
    assert gradient.flatten().tolist() == [1, 1, 1, 1]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("replace", [False, True])
def test_the_sum_is_wider_than_the_product(replace: bool) -> None:
    a, b = numbers(5, 7), numbers(7, 3)
    total = torch.full((5, 3), torch.nan if replace else 1000.0)
    add_product(total, a, b, replace)
    torch.testing.assert_close(total, (a @ b).float() + (0.0 if replace else 1000.0), rtol=0, atol=0)


@pytest.mark.parametrize("replace", [False, True])
def test_cuda_adds_in_one_operation(monkeypatch: pytest.MonkeyPatch, replace: bool) -> None:
    """Without a GPU: tensors that only claim to be on one."""

    class OnCuda(Tensor):
        is_cpu = False

    total, a, b = (x.as_subclass(OnCuda) for x in (torch.empty(5, 3), numbers(5, 7), numbers(7, 3)))
    operation = Mock()
    monkeypatch.setattr(torch, "addmm", operation)
    add_product(total, a, b, replace)
    operation.assert_called_once_with(total, a, b, torch.float32, beta=0 if replace else 1, out=total)


@pytest.mark.parametrize("replace", [False, True])
def test_the_meta_device_adds_in_one_operation(replace: bool) -> None:
    total = torch.empty(5, 3, device="meta")
    with Calls() as calls:
        add_product(total, numbers(5, 7).to("meta"), numbers(7, 3).to("meta"), replace)
    assert [function for function, _ in calls.found][-1:] == [torch.ops.aten.addmm_.default]


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
