"""A product of rows with a matrix, and the two gradients of it that autograd alone would handle too late.

Rows x [n, in] and weight [out, in] give x @ weight^T. With the gradient g [n, out] of the result:

    g @ weight     of the rows. Each tensor-parallel rank has a partial sum of it, and autograd would wait for the sum
                   where it arises. A caller that walks sub-blocks backward itself (`model/backward.py`) passes an
                   `InputGradient` instead: the product starts the sum there and continues with the gradient of its
                   weight, and the caller waits when it needs the result, one sub-block later.
    g^T @ x        of the weight. Autograd would write it in the precision of the model, and a second kernel would add
                   it to the sum of an optimizer that sums in fp32. A `GradientSum` of the weight adds it at once.

ZeRO-3 gathers a parameter before each use and releases it after; `linear` and `reached_by_backward` allow for that.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megatron_ladder.comm.inflight import InFlight, Launch
from megatron_ladder.parallel.partial_gradients import PartialGradients

SUM = "gradient_sum"
"""The attribute of a parameter with a `GradientSum`, which then gets no gradient from autograd."""
GradientSum = Callable[[Tensor, Tensor], None]
"""Adds the gradient a @ b, once per backward pass."""
LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [..., in], weight [out, in], bias [out] or None) -> [..., out]."""


class InputGradient:
    """Serves one backward pass of one sub-block; owned by the code that walks it.

    Attributes:
        launch: starts to sum the parts of the ranks; may be replaced before backward.
        partial_gradients: collects those of replicated parameters inside the sub-block.
        in_flight: the gradient, once backward has computed this rank's part of it for all uses of the input.
        input_again: the input, which the caller gathers again for backward; None until that gather starts.
    """

    def __init__(self, launch: Launch, partial_gradients: PartialGradients, keeps_input: bool = True) -> None:
        """Without `keeps_input` the caller sets `input_again` before backward."""
        self.launch = launch
        self.partial_gradients = partial_gradients
        self.input_again: InFlight | None = None
        self.in_flight: InFlight | None = None
        self._keeps_input = keeps_input
        self._uses = 0
        self._part: Tensor | None = None

    def use(self, x: Tensor) -> tuple[Tensor, ...]:
        """Count one more use of the input, and return what it keeps for backward."""
        self._uses += 1
        return (x,) if self._keeps_input else ()

    def add(self, part: Tensor) -> None:
        """Add this rank's gradient of one use; that of the last one starts the sum over the ranks."""
        self._part = part if self._part is None else self._part + part
        self._uses -= 1
        if self._uses == 0:
            self.in_flight, self._part = self.launch(self._part), None

    def wait(self) -> Tensor:
        """Return the gradient of the input: [s, b, in] summed, this rank's positions of it, or its part of the sum."""
        assert self.in_flight is not None, "the column-parallel layer's backward has not run"
        return self.in_flight.wait()


class _Product(Function):
    """Saves the parameter for backward, before which ZeRO-3 gathers it again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, input_gradient: InputGradient | None, wide: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, *((x,) if input_gradient is None else input_gradient.use(x)))
        ctx.input_gradient, ctx.dtype, ctx.has_bias = input_gradient, x.dtype, bias is not None
        ctx.sum = None if wide else getattr(weight, SUM, None)
        dtype = torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
        return F.linear(x.to(dtype), weight.to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        weight, *kept = ctx.saved_tensors
        of_x: Tensor | None = None
        if ctx.input_gradient is not None or ctx.needs_input_grad[0]:
            of_x = (gradient @ weight.to(gradient.dtype)).to(ctx.dtype)
        if ctx.input_gradient is not None:
            ctx.input_gradient.add(of_x)
            of_x = None
        x = kept[0] if kept else ctx.input_gradient.input_again.wait()
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        a, b = gradient.flatten(0, -2).t(), x.flatten(0, -2).to(gradient.dtype)
        of_weight = (a @ b).to(weight.dtype) if ctx.sum is None else ctx.sum(a, b)
        return of_x, of_weight, of_bias, None, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, input_gradient: InputGradient | None = None, wide: bool = False
) -> Tensor:
    """Return `x @ weight^T + bias`, for x [..., in] and weight [out, in].

    The gradient of x goes to `input_gradient`, if given. `wide` products are computed in fp32 at least.

    torch's own function saves a view of the weight for backward, and with it the memory of the whole weight, and leaves
    its gradient to autograd. A parameter that ZeRO-3 partitions (it has a `ds_id`), or whose gradients are summed
    elsewhere, therefore goes through a function that saves the parameter.
    """
    if input_gradient is None and not (wide or hasattr(weight, "ds_id") or hasattr(weight, SUM)):
        return F.linear(x, weight, bias)
    result: Tensor = _Product.apply(x, weight, bias, input_gradient, wide)
    return result


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
    return _Reached.apply(x, x.new_empty(0).requires_grad_())


def add_product(total: Tensor, a: Tensor, b: Tensor, replace: bool = False) -> None:
    """Add a @ b to the total, which may have a wider dtype, or replace it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=1 - replace)
    elif not total.is_cpu:
        torch.addmm(total, a, b, total.dtype, beta=1 - replace, out=total)
    elif replace:
        total.copy_(a @ b)
    else:
        total += a @ b
