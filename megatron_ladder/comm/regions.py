"""Borders between computation that is equal on all tensor-parallel ranks and computation on a rank's own slice.

Each function is the identity forward and a reduce backward, so that a gradient that leaves the region is complete on
every rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_ladder.comm.group import CommGroup


class _EnterTogether(Function):
    @staticmethod
    def forward(ctx: Any, group: CommGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole = ctx.group.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = whole.split([gradient.numel() for gradient in gradients])
        return None, *(part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True))


class _SumGradientRows(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, start: int, stop: int, group: CommGroup) -> Tensor:
        ctx.rows = slice(start, stop)
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        whole = gradient.clone()
        whole[ctx.rows] = ctx.group.all_reduce(whole[ctx.rows].contiguous())
        return whole, None, None, None


def copy_to_tensor_parallel_region(tensor: Tensor, group: CommGroup) -> Tensor:
    """Return `tensor`; its gradient, of which each rank has a partial sum, is reduced over `group`.

    For activations that enter column-parallel layers, and for replicated parameters that are used on a rank's own
    heads (the norms of queries and keys).
    """
    return enter_tensor_parallel_region(group, tensor)[0]


def enter_tensor_parallel_region(group: CommGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply `copy_to_tensor_parallel_region` to tensors of one dtype, whose gradients are summed in one reduce."""
    return tensors if group.size == 1 or not torch.is_grad_enabled() else _EnterTogether.apply(group, *tensors)


class _ShareGradient(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def share_gradient(tensor: Tensor, group: CommGroup) -> Tensor:
    """Return `tensor`, which all ranks have computed alike; each rank gets an equal part of its gradient."""
    return tensor if group.size == 1 else _ShareGradient.apply(tensor, group.size)


def sum_gradient_rows(weight: Tensor, start: int, stop: int, group: CommGroup) -> Tensor:
    """Return `weight`; rows `start` to `stop` of its gradient are summed over `group`.

    For key and value heads that several ranks hold: each rank gets the gradient from its own query heads only. A
    weight that requires no gradient is returned unchanged: it may be packed, and packed weights have no views.
    """
    if group.size == 1 or not weight.requires_grad:
        return weight
    return _SumGradientRows.apply(weight, start, stop, group)
