"""How the tensor-parallel ranks share the residual stream, and the collectives at its two borders.

With t ranks, s positions, b samples and h features, a sub-block multiplies its whole input with its slice of a weight,
and ends in a partial sum of its output. So there is a border before and after each sub-block:

                          stream           start_read                      start_write
    StreamLayout          [s, b, h]        identity                        all-reduce
    ShardedStream         [s/t, b, h]      all-gather to [s, b, h]         reduce-scatter to [s/t, b, h]

An all-reduce is a reduce-scatter followed by an all-gather, so both layouts send the same number of bytes. Sharded, a
rank norms, adds and keeps for backward only its own positions. Gradients cross the borders in the opposite direction
with the same two operations: the gradient of an output is read, that of an input is written. The functions at the end
are borders without communication forward, whose backward completes a gradient that leaves a rank's slice.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.comm.inflight import InFlight, start_all_reduce


class Crossing(Protocol):
    """Carries the input of a body to the ranks that compute with it, and its output back.

    Gradients travel with the same two operations: that of an output as an input, and that of an input as an output.
    Both are differentiable; the collectives of their backward are waited for at once.
    """

    kept: tuple[Tensor, ...]
    """What is not computed again when the input is."""

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Further arguments of the body; to be read when its input has arrived."""

    def start_read(self, stream: Tensor) -> InFlight:
        """Start to map what this rank sends to the input of its body."""

    def start_write(self, partial: Tensor) -> InFlight:
        """Start to map the output of this rank's body to what its stream gets; do not use `partial` afterwards."""


class StreamLayout:
    """The crossing where every rank holds all positions."""

    shards = 1
    """Number of parts of the sequence."""
    arguments: tuple[Tensor, ...] = ()
    kept: tuple[Tensor, ...] = ()

    def __init__(self, group: CommGroup) -> None:
        self.group = group

    def start_read(self, stream: Tensor) -> InFlight:
        """Start to map this rank's [s / shards, b, h] to [s, b, h], equal on all ranks."""
        return InFlight(stream, None)

    def start_write(self, partial: Tensor) -> InFlight:
        """Start to map this rank's partial sum [s, b, h] to its part of the sum; do not use `partial` afterwards."""
        return start_all_reduce(partial, self.group)

    def enter(self, stream: Tensor) -> Tensor:
        """Return the whole stream, whose gradient is summed; for a layer that does not sum it itself."""
        return copy_to_tensor_parallel_region(stream, self.group)


class ShardedStream(StreamLayout):
    """Every rank holds s/t neighbouring positions, in rank order (sequence parallelism, arXiv 2205.05198)."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__(group)
        self.shards = group.size

    def start_read(self, stream: Tensor) -> InFlight:
        # Each rank uses all positions, so their gradients are summed.
        whole, work = _Border.apply(self._gather, lambda gradient, _: [InFlight(*self._sum(gradient)).wait()], stream)
        return InFlight(whole, work)

    def start_write(self, partial: Tensor) -> InFlight:
        # Every rank's partial sum gets the gradient of the sum at all positions.
        rows, work = _Border.apply(self._sum, lambda gradient, _: [InFlight(*self._gather(gradient)).wait()], partial)
        return InFlight(rows, work, partial)

    def _gather(self, part: Tensor) -> tuple[Tensor, Work | None]:
        return self.group.start_all_gather(part.contiguous())

    def _sum(self, partial: Tensor) -> tuple[Tensor, Work | None]:
        return self.group.start_reduce_scatter(partial.contiguous())

    def enter(self, stream: Tensor) -> Tensor:
        return self.start_read(stream).wait()


def start_exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: CommGroup) -> InFlight:
    """Start `CommGroup.start_all_to_all`, differentiably; the gradients of the rows return in backward, at once."""

    def start(rows: Tensor) -> tuple[Tensor, Work | None]:
        return group.start_all_to_all(rows, sent, received)

    def run_back(gradient: Tensor, _: None) -> list[Tensor]:
        return [InFlight(*group.start_all_to_all(gradient.contiguous(), received, sent)).wait()]

    if group.size == 1:
        return InFlight(rows, None)
    rows = rows.contiguous()
    into, work = _Border.apply(start, run_back, rows)
    return InFlight(into, work, rows)


class _Border(Function):
    """Calls one function forward, and another with the gradients of its results backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], run_backward: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.run_backward = run_backward
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.run_backward(*gradients)


def copy_to_tensor_parallel_region(tensor: Tensor, group: CommGroup) -> Tensor:
    """Return `tensor`; its gradient, of which each rank has a partial sum, is reduced over `group`.

    For activations that enter column-parallel layers, and for replicated parameters that are used on a rank's own
    heads (the norms of queries and keys).
    """
    return enter_tensor_parallel_region(group, tensor)[0]


def enter_tensor_parallel_region(group: CommGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply `copy_to_tensor_parallel_region` to tensors of one dtype, whose gradients are summed in one reduce."""

    def sum_together(*gradients: Tensor) -> list[Tensor]:
        whole = group.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = whole.split([gradient.numel() for gradient in gradients])
        return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

    if group.size == 1 or not torch.is_grad_enabled():
        return tensors
    return _Border.apply(lambda *same: tuple(tensor.view_as(tensor) for tensor in same), sum_together, *tensors)


def share_gradient(tensor: Tensor, group: CommGroup) -> Tensor:
    """Return `tensor`, which all ranks have computed alike; each rank gets an equal part of its gradient."""
    if group.size == 1 or not tensor.requires_grad:
        return tensor
    view = tensor.view_as(tensor)
    view.register_hook(lambda gradient: gradient / group.size)
    return view
