"""The gradient of a column-parallel layer's input, in flight to its sum over the tensor-parallel ranks.

Each rank has a partial sum of it. Autograd would wait for the sum where it arises. A caller that walks sub-blocks
backward itself (`model/backward.py`) passes the layer an `InputGradient` instead: the layer starts the sum there and
continues with the gradient of its weight, and the caller waits when it needs the result, one sub-block later.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megatron_ladder.comm.inflight import InFlight, Launch
from megatron_ladder.parallel.partial_gradients import PartialGradients
from megatron_ladder.parallel.weight_gradient import gradient_sum, weight_gradient


class InputGradient:
    """Serves one backward pass of one sub-block; owned by the code that walks it.

    Attributes:
        launch: starts to sum the parts of the ranks; may be replaced before backward.
        partial_gradients: collects those of replicated parameters inside the sub-block.
        in_flight: the gradient, once backward has computed this rank's part of it for all uses of the input.
        input_again: the layer's input, which the caller gathers again for backward; None until that gather starts.
    """

    def __init__(self, launch: Launch, partial_gradients: PartialGradients, keeps_input: bool = True) -> None:
        """Without `keeps_input` the caller sets `input_again` before backward."""
        self.launch = launch
        self.partial_gradients = partial_gradients
        self.keeps_input = keeps_input
        self.input_again: InFlight | None = None
        self.in_flight: InFlight | None = None
        self._uses = 0
        self._part: Tensor | None = None

    def use(self, x: Tensor) -> Tensor:
        """Return the input for one of its uses by the body, whose gradient for it joins the sum."""
        self.expect()
        return _Used.apply(x, self)

    def expect(self) -> None:
        """Count one more use of the input."""
        self._uses += 1

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


class _Used(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, input_gradient: InputGradient) -> Tensor:
        ctx.input_gradient = input_gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.input_gradient.add(gradient)
        return None, None


class _LinearWithInputGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, input_gradient: InputGradient) -> Tensor:
        input_gradient.expect()
        ctx.save_for_backward(weight, *([x] if input_gradient.keeps_input else []))
        ctx.input_gradient, ctx.sum = input_gradient, gradient_sum(weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        weight, *kept = ctx.saved_tensors
        ctx.input_gradient.add(gradient @ weight)
        x = kept[0] if kept else ctx.input_gradient.input_again.wait()
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        return None, weight_gradient(gradient, x, ctx.sum), of_bias, None


class _WideLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, input_gradient: InputGradient | None) -> Tensor:
        if input_gradient is not None:
            input_gradient.expect()
        keeps_input = input_gradient is None or input_gradient.keeps_input
        ctx.save_for_backward(weight, *([x] if keeps_input else []))
        ctx.input_gradient, ctx.dtype = input_gradient, x.dtype
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), weight.to(wide))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        weight, *kept = ctx.saved_tensors
        of_x: Tensor | None = (gradient @ weight.to(gradient.dtype)).to(ctx.dtype)
        if ctx.input_gradient is not None:
            ctx.input_gradient.add(of_x)
            of_x = None
        x = kept[0] if kept else ctx.input_gradient.input_again.wait()
        rows = gradient.reshape(-1, weight.shape[0])
        of_weight = rows.t() @ x.reshape(-1, weight.shape[1]).to(gradient.dtype)
        return of_x, of_weight.to(weight.dtype), None


def wide_linear(x: Tensor, weight: Tensor, input_gradient: InputGradient | None) -> Tensor:
    """Return `x @ weight^T` in fp32 at least; the gradient of x goes to `input_gradient`, if given."""
    result: Tensor = _WideLinear.apply(x, weight, input_gradient)
    return result


def linear_with_input_gradient(x: Tensor, weight: Tensor, bias: Tensor | None, input_gradient: InputGradient) -> Tensor:
    """Return `x @ weight^T + bias`; the gradient of x goes to `input_gradient`, its sum started before the weight's."""
    return _LinearWithInputGradient.apply(x, weight, bias, input_gradient)
