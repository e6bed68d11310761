"""Gradients of replicated parameters of which each tensor-parallel rank has only a part.

A norm that meets a rank's own heads, or its own positions, gets a partial sum of its gradient; so does one whose
sub-block's input gradient is summed elsewhere. Left to autograd (`copy_to_tensor_parallel_region`), each of them is an
all-reduce that is waited for at once. A caller that walks sub-blocks backward itself collects them here and sums them
all by one reduce, once in a backward pass, or once in all the passes of an optimizer step. They reach their parameters
inside of that pass and whole, since ZeRO takes a gradient away the moment that it arrives.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.group import CommGroup


class _Parameter(NamedTuple):
    """What is known of a parameter while it is used: at the end of the pass ZeRO-3 has put it away."""

    identity: int
    edge: GradientEdge
    """Leads to its gradient."""
    shape: torch.Size
    dtype: torch.dtype


class PartialSums:
    """This rank's parts of gradients, over the passes that make up an optimizer step."""

    def __init__(self, group: CommGroup) -> None:
        self.group = group
        self._passes_left = 1
        self._sums: dict[int, tuple[_Parameter, Tensor]] = {}
        """By the parameter's identity: the parameter, and this rank's sum so far."""

    def expect(self, passes: int) -> None:
        """Puts the reduce off to the last of so many backward passes; afterwards each pass has its own again."""
        self._passes_left = passes

    def add(self, parameter: _Parameter, gradient: Tensor) -> None:
        """Takes this rank's part of a gradient; parts of several passes are added in fp32 at least."""
        _, earlier = self._sums.get(parameter.identity, (parameter, None))
        wide = gradient if self._passes_left == 1 and earlier is None else gradient.to(_at_least_fp32(gradient.dtype))
        self._sums[parameter.identity] = parameter, wide if earlier is None else earlier + wide

    def end_pass(self) -> None:
        """Called at the end of each backward pass; after the last, every parameter has its gradient."""
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
        torch.autograd.backward([parameter.edge for parameter in parameters], gradients)


class PartialGradients:
    """Serves one backward pass over a range of sub-blocks."""

    def __init__(self, sums: PartialSums) -> None:
        self._sums = sums
        self._deferred: list[tuple[_Parameter, Tensor]] = []

    def defer(self, parameter: Tensor) -> Tensor:
        """A stand-in for a parameter; the gradient that it gets is summed over the group before the parameter's own."""
        stand_in = parameter.detach().requires_grad_()
        with torch.enable_grad():
            edge = get_gradient_edge(parameter.view_as(parameter))
        self._deferred.append((_Parameter(id(parameter), edge, parameter.shape, parameter.dtype), stand_in))
        return stand_in

    def end_pass(self) -> None:
        """Hands on what the stand-ins got."""
        for parameter, stand_in in self._deferred:
            self._sums.add(parameter, torch.zeros_like(stand_in) if stand_in.grad is None else stand_in.grad)
        self._deferred.clear()
        self._sums.end_pass()


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
