"""Gradients of replicated parameters of which each tensor-parallel rank has only a part.

A norm that meets a rank's own heads, or its own positions, gets a partial sum of its gradient. Left to autograd
(`copy_to_tensor_parallel_region`), each of them is an all-reduce that is waited for at once. A caller that walks
sub-blocks backward itself collects them here and sums them all by one reduce. They reach their parameters when they are
whole, since ZeRO takes a gradient away the moment that it arrives.
"""

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_ladder.comm.group import CommGroup


class PartialGradients:
    """Serves one backward pass over a range of sub-blocks."""

    def __init__(self, group: CommGroup) -> None:
        self.group = group
        self._deferred: list[tuple[GradientEdge, Tensor]] = []

    def defer(self, parameter: Tensor) -> Tensor:
        """A stand-in for a parameter; the gradient that it gets is summed over the group before the parameter's own."""
        stand_in = parameter.detach().requires_grad_()
        self._deferred.append((get_gradient_edge(parameter.view_as(parameter)), stand_in))
        return stand_in

    def flush(self) -> None:
        """Sums what the stand-ins got, and hands it to their parameters."""
        if not self._deferred:
            return
        edges, stand_ins = zip(*self._deferred, strict=True)
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in stand_ins]
        whole = self.group.all_reduce(torch.cat([part.flatten() for part in parts]))
        pieces = whole.split([part.numel() for part in parts])
        torch.autograd.backward(edges, [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)])
        self._deferred.clear()
