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


class _Sum(NamedTuple):
    """This rank's parts of one parameter's gradient, added up."""

    edge: GradientEdge
    """Where the whole gradient goes."""
    total: Tensor
    dtype: torch.dtype
    """Of the gradient."""


class PartialSums:
    """This rank's parts of gradients, over the passes that make up an optimizer step."""

    def __init__(self, group: CommGroup) -> None:
        self.group = group
        self._passes_left = 1
        self._sums: dict[int, _Sum] = {}
        """By the parameter's identity."""

    def expect(self, passes: int) -> None:
        """Puts the reduce off to the last of so many backward passes; afterwards each pass has its own again."""
        self._passes_left = passes

    def add(self, parameter: Tensor, edge: GradientEdge, gradient: Tensor) -> None:
        """Takes this rank's part of a gradient; parts of several passes are added in fp32 at least.

        Args:
            edge: where the whole gradient goes, made while the parameter was there: ZeRO-3 takes it away.
        """
        earlier = self._sums.get(id(parameter))
        if earlier is None and self._passes_left == 1:
            self._sums[id(parameter)] = _Sum(edge, gradient, gradient.dtype)
        else:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            total = wide if earlier is None else earlier.total + wide
            self._sums[id(parameter)] = _Sum(edge, total, gradient.dtype)

    def end_pass(self) -> None:
        """Called at the end of each backward pass; after the last, every parameter has its gradient."""
        self._passes_left = max(0, self._passes_left - 1)
        if self._passes_left > 0:
            return
        self._passes_left = 1
        if not self._sums:
            return
        sums = list(self._sums.values())
        self._sums.clear()
        whole = self.group.all_reduce(torch.cat([each.total.flatten() for each in sums]))
        parts = whole.split([each.total.numel() for each in sums])
        gradients = [part.view_as(each.total).to(each.dtype) for part, each in zip(parts, sums, strict=True)]
        torch.autograd.backward([each.edge for each in sums], gradients)


class PartialGradients:
    """Serves one backward pass over a range of sub-blocks."""

    def __init__(self, sums: PartialSums) -> None:
        self._sums = sums
        self._deferred: list[tuple[Tensor, GradientEdge, Tensor]] = []

    def defer(self, parameter: Tensor) -> Tensor:
        """A stand-in for a parameter; the gradient that it gets is summed over the group before the parameter's own."""
        stand_in = parameter.detach().requires_grad_()
        self._deferred.append((parameter, get_gradient_edge(parameter.view_as(parameter)), stand_in))
        return stand_in

    def end_pass(self) -> None:
        """Hands on what the stand-ins got."""
        for parameter, edge, stand_in in self._deferred:
            self._sums.add(parameter, edge, torch.zeros_like(stand_in) if stand_in.grad is None else stand_in.grad)
        self._deferred.clear()
        self._sums.end_pass()
