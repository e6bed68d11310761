"""Linear products and inputs for parameters that ZeRO-3 gathers before each use and releases after it."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [..., in], weight [out, in], bias [out] or None) -> [..., out]."""


class _LinearOfPartitionedWeight(Function):
    """Saves the parameter for backward, before which ZeRO-3 gathers it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])
        input_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        weight_gradient = rows.t() @ x.reshape(-1, weight.shape[1])
        return input_gradient, weight_gradient, rows.sum(0) if ctx.has_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight^T + bias`, for x [..., in] and weight [out, in].

    torch's own function saves a view of the weight for backward, and with it the memory of the whole weight. A
    parameter that ZeRO-3 partitions (it has a `ds_id`) therefore goes through a function that saves the parameter.
    """
    if not hasattr(weight, "ds_id"):
        return F.linear(x, weight, bias)
    output: Tensor = _LinearOfPartitionedWeight.apply(x, weight, bias)
    return output


class _Reached(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        return None, None


def reached_by_backward(x: Tensor) -> Tensor:
    """Return x for a module whose input gradient does not go through autograd.

    ZeRO-3 releases a module's weight when backward arrives at its input, so the input must appear to need a gradient.
    As a leaf it would stay in memory until then.
    """
    reached: Tensor = _Reached.apply(x, x.new_empty(0).requires_grad_())
    return reached
