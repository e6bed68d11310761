"""The gradient of a column-parallel layer's input, on its way to being summed over the tensor-parallel ranks.

Each rank has a partial sum of it. Left to autograd, the sum would be waited for where it arises. A caller that walks
sub-blocks backward itself (`model/backward.py`) gives the layer an `InputGradient` instead: the layer starts the sum
there and goes on with the gradient of its weight, and the caller waits when it needs the result, another sub-block
later. Gradients of replicated parameters that met only this rank's heads ride along in the same reduce, and reach
their parameters when they are whole, since ZeRO takes a gradient away the moment that it arrives.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.group import CommGroup, Work


class _Deferred(NamedTuple):
    """A replicated parameter that met only what this rank has."""

    parameter: Tensor
    edge: GradientEdge
    """Where its whole gradient goes."""
    stand_in: Tensor
    """What was used instead; collects this rank's part of the gradient."""


class InputGradient:
    """Serves one backward pass of one sub-block; owned by whoever walks it."""

    def __init__(self, group: CommGroup, reduce: bool = True) -> None:
        """
        Args:
            reduce: False leaves the sums to the caller, who takes this rank's parts (`unreduced`).
        """
        self.group = group
        self._reduce = reduce
        self._replicated: list[_Deferred] = []
        self._buffer: Tensor | None = None
        self._shape = torch.Size()
        self._work: Work | None = None

    def defer(self, parameter: Tensor) -> Tensor:
        """A stand-in for a replicated parameter; the gradient that it gets is summed before the parameter's own."""
        stand_in = parameter.detach().requires_grad_()
        self._replicated.append(_Deferred(parameter, get_gradient_edge(parameter.view_as(parameter)), stand_in))
        return stand_in

    def start(self, output_gradient: Tensor, weight: Tensor) -> None:
        """Computes this rank's part of the input's gradient, `output_gradient @ weight`, and starts the sum.

        Args:
            output_gradient: [s, b, out/t].
            weight: [out/t, in].
        """
        self._shape = torch.Size((*output_gradient.shape[:-1], weight.shape[1]))
        size = self._shape.numel()
        extra = sum(deferred.stand_in.numel() for deferred in self._replicated) if self._reduce else 0
        self._buffer = output_gradient.new_empty(size + extra)
        rows = self._buffer[:size].view(-1, weight.shape[1])
        torch.mm(output_gradient.reshape(-1, weight.shape[0]), weight, out=rows)
        if not self._reduce:
            return
        for deferred, part in zip(self._replicated, self._parts(), strict=True):
            if deferred.stand_in.grad is None:
                part.zero_()
            else:
                part.copy_(deferred.stand_in.grad)
        self._work = self.group.start_all_reduce(self._buffer)

    def wait(self) -> Tensor:
        """The whole gradient of the input, [s, b, in]; replicated parameters have theirs when this returns."""
        if self._work is not None:
            self._work.wait()
        if self._replicated:
            torch.autograd.backward([deferred.edge for deferred in self._replicated], self._parts())
        return self.unreduced()

    def unreduced(self) -> Tensor:
        """Before a reduce, this rank's part of the gradient of the input, [s, b, in]."""
        assert self._buffer is not None, "the column-parallel layer's backward has not run"
        return self._buffer[: self._shape.numel()].view(self._shape)

    def unreduced_parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Deferred parameters, and this rank's parts of their gradients."""
        for deferred in self._replicated:
            if deferred.stand_in.grad is not None:
                yield deferred.parameter, deferred.stand_in.grad

    def _parts(self) -> list[Tensor]:
        """The buffer's places of the replicated parameters, in their shapes."""
        assert self._buffer is not None
        parts, position = [], self._shape.numel()
        for deferred in self._replicated:
            stand_in = deferred.stand_in
            parts.append(self._buffer[position : position + stand_in.numel()].view_as(stand_in))
            position += stand_in.numel()
        return parts


class _LinearGivingInputGradient(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, input_gradient: InputGradient
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.input_gradient = input_gradient
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        ctx.input_gradient.start(gradient, weight)
        rows = gradient.reshape(-1, weight.shape[0])
        weight_gradient = rows.t() @ x.reshape(-1, weight.shape[1])
        return None, weight_gradient, rows.sum(0) if ctx.has_bias else None, None


def linear_giving_input_gradient(
    x: Tensor, weight: Tensor, bias: Tensor | None, input_gradient: InputGradient
) -> Tensor:
    """`x @ weight^T + bias`; the gradient of x goes to `input_gradient`, its sum started before the weight's."""
    output: Tensor = _LinearGivingInputGradient.apply(x, weight, bias, input_gradient)
    return output
