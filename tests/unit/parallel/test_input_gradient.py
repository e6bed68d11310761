"""The reduce of an input's gradient starts before the weight's gradient is computed, and carries what rides along."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.parallel.input_gradient import InputGradient, linear_giving_input_gradient


class DoublingGroup(CommGroup):
    """Two ranks that hold the same numbers, so a sum over them doubles; notes when it is started and waited for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__([0, 1], 0, None)
        self.events = events

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        self.events.append("start")
        events = self.events

        class Doubling:
            def wait(self) -> None:
                events.append("wait")
                tensor.mul_(2)

        return Doubling()


class Products(TorchDispatchMode):
    """Notes matrix products."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(function):
            self.events.append("product")
        return function(*args, **(kwargs or {}))


def test_the_sum_starts_between_the_two_products() -> None:
    events: list[str] = []
    input_gradient = InputGradient(DoublingGroup(events))
    x, weight = torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    bias = torch.randn(5, dtype=torch.float64)
    own_x, own_weight, own_bias = (tensor.clone().requires_grad_() for tensor in (x, weight, bias))
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    output = linear_giving_input_gradient(x, weight, bias, input_gradient)
    gradient = torch.randn_like(output)
    torch.nn.functional.linear(own_x, own_weight, own_bias).backward(gradient)
    with Products(events):
        output.backward(gradient)
    assert events == ["product", "start", "product"]
    assert x.grad is None and own_x.grad is not None
    torch.testing.assert_close(input_gradient.wait(), 2 * own_x.grad, rtol=1e-12, atol=0)
    torch.testing.assert_close((weight.grad, bias.grad), (own_weight.grad, own_bias.grad), rtol=1e-12, atol=1e-14)


def test_a_replicated_parameter_gets_its_gradient_once_and_whole() -> None:
    events: list[str] = []
    input_gradient = InputGradient(DoublingGroup(events))
    scale = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    scale.register_hook(lambda gradient: events.append("arrives"))
    x, weight = torch.ones(1, 1, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    output = linear_giving_input_gradient(x, weight.requires_grad_(), None, input_gradient)
    (output * input_gradient.defer(scale)).sum().backward()
    assert scale.grad is None
    input_gradient.wait()
    assert events == ["start", "wait", "arrives"]
    assert scale.grad is not None and scale.grad.tolist() == [6.0, 6.0]
