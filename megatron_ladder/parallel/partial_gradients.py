"""Gradients of replicated parameters of which each tensor-parallel rank has only a partial sum.

The weight of a norm gets a partial gradient if the norm reads a rank's own heads or positions, or if the input gradient
of its sub-block is summed elsewhere. Left to autograd (`copy_to_tensor_parallel_region`), each of these gradients is an
all-reduce that is waited for at once. A caller that walks sub-blocks backward itself collects them here and sums all of
them in one reduce, once per backward pass, or once for all passes of an optimizer step. The sums reach their parameters
inside that backward pass, because ZeRO takes a gradient away as soon as it arrives.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.stream import copy_to_tensor_parallel_region


class _Parameter(NamedTuple):
    """A parameter, and what it was while it was used: at the end of the pass ZeRO-3 has released it."""

    tensor: Tensor
    edge: GradientEdge
    """Leads to its gradient."""
    shape: torch.Size
    dtype: torch.dtype


class PartialSums:
    """This rank's partial gradients over the passes of an optimizer step."""

    def __init__(self, group: CommGroup) -> None:
        self.group = group
        self._passes_left = 1
        self._sums: dict[int, tuple[_Parameter, Tensor]] = {}
        """Identity of the parameter -> the parameter, and this rank's sum so far."""

    def expect(self, passes: int) -> None:
        """Defer the reduce to the last of the next `passes` backward passes; afterwards every pass reduces again."""
        self._passes_left = passes
        # Those of a pass that has failed.
        self._sums.clear()

    def add(self, parameter: _Parameter, gradient: Tensor) -> None:
        """Add this rank's part of a gradient; parts of several passes are summed in fp32 at least."""
        identity = id(parameter.tensor)
        _, earlier = self._sums.get(identity, (parameter, None))
        wide = gradient
        if self._passes_left != 1 or earlier is not None:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        self._sums[identity] = parameter, wide if earlier is None else earlier + wide

    def end_pass(self) -> None:
        """End a backward pass; after the last one, every parameter has its gradient."""
        self._passes_left = max(0, self._passes_left - 1)
        if self._passes_left > 0:
            return
        self._passes_left = 1
        if not self._sums:
            return
        parameters, sums = zip(*self._sums.values(), strict=True)
        self._sums.clear()
        whole = self.group.all_reduce(torch.cat([part.flatten() for part in sums]))
        parts = whole.split([part.numel() for part in sums])
        gradients = [part.view(p.shape).to(p.dtype) for part, p in zip(parts, parameters, strict=True)]
        # Autograd copies a gradient whose strides are not those of its parameter, in the shape of the parameter.
        released = [
            (p.tensor, p.tensor.data, gradient)
            for p, gradient in zip(parameters, gradients, strict=True)
            if p.tensor.shape != p.shape
        ]
        for tensor, _, gradient in released:
            tensor.data = gradient
        torch.autograd.backward([parameter.edge for parameter in parameters], gradients)
        for tensor, nothing, _ in released:
            tensor.data = nothing


class PartialGradients:
    """The partial gradients of one backward pass over a range of sub-blocks."""

    def __init__(self, sums: PartialSums) -> None:
        """Parameters get their gradients on the current stream, also those that are deferred on another one.

        DeepSpeed copies a gradient to a bucket on the stream on which it arrives, and the one that fills the bucket
        reduces it there, without waiting for the others' streams.
        """
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._sums = sums
        self._deferred: list[tuple[_Parameter, Tensor]] = []
        self._collected: dict[int, tuple[_Parameter, Tensor]] = {}

    def defer(self, parameter: Tensor) -> Tensor:
        """Return a stand-in for a parameter; its gradient is summed over the group before it reaches the parameter.

        A frozen parameter is returned itself.
        """
        if not parameter.requires_grad:
            return parameter
        self._deferred.append(self._stand_in(parameter))
        return self._deferred[-1][1]

    def collect(self, parameter: Tensor) -> Tensor:
        """Return the stand-in for a parameter that several sub-blocks use, and that shall get their gradients at once,
        because ZeRO counts them. The gradients are complete. A frozen parameter is returned itself."""
        if not parameter.requires_grad:
            return parameter
        if id(parameter) not in self._collected:
            self._collected[id(parameter)] = self._stand_in(parameter)
        return self._collected[id(parameter)][1]

    def _stand_in(self, parameter: Tensor) -> tuple[_Parameter, Tensor]:
        with torch.enable_grad(), torch.cuda.stream(self._stream):
            edge = get_gradient_edge(parameter.view_as(parameter))
        described = _Parameter(parameter, edge, parameter.shape, parameter.dtype)
        return described, parameter.detach().requires_grad_()

    def end_pass(self) -> None:
        """Pass on the gradients of the stand-ins."""
        for parameter, stand_in in self._deferred:
            self._sums.add(parameter, torch.zeros_like(stand_in) if stand_in.grad is None else stand_in.grad)
        self._deferred.clear()
        for parameter, stand_in in self._collected.values():
            torch.autograd.backward([parameter.edge], [stand_in.grad])
        self._collected.clear()
        self._sums.end_pass()


def sum_gradient(parameter: Tensor, group: CommGroup | None, partial_gradients: PartialGradients | None) -> Tensor:
    """Return a parameter for a use on data that differ between the ranks of a group, if there is one; the parts of its
    gradient are summed.

    `partial_gradients` sums them later; without it, each sum is waited for where the gradient arises.
    """
    if group is None or not torch.is_grad_enabled():
        return parameter
    if partial_gradients is not None:
        return partial_gradients.defer(parameter)
    return copy_to_tensor_parallel_region(parameter, group)
