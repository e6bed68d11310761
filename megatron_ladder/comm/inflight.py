"""A tensor whose sum over the ranks is in flight.

Timeline of two ladder sub-blocks, time running to the right (`~~~` is the wire):

    compute   [ h_0(r) ][ h_1(r) ][ h_2(r + y_0) ][ ...
    wire                ~~ y_0 ~~ ~~ y_1 ~~
                        ^ start_all_reduce(partial of h_0)
                                  ^ wait(): y_0 is complete, h_1 has hidden it

Until `wait` the buffer belongs to the handle: nothing else may read or write it, and autograd has saved no alias of it
(the backward of a matrix product does not need its output).

On CUDA, NCCL's stream must not use memory that the allocator has given to another tensor since. With `async_op=True`
torch keeps the tensor alive until `Work.wait` has made the current stream wait for NCCL's. So no `record_stream` is
needed under one condition, which both walks keep: a handle is waited for on the stream that computes, where the buffer
was allocated. Reads of a sharded stream are waited for on another stream; `side_queue.py` holds their tensors instead.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_ladder.comm.group import CommGroup, Work


class InFlight(NamedTuple):
    """A tensor that is being communicated; `wait` returns the result."""

    partial: Tensor
    """The result's buffer; for an all-reduce, this rank's partial sum until the reduce is complete."""
    work: Work | None
    """The collective's handle; None if there is nothing to wait for."""
    held: Tensor | None = None
    """A tensor that is being sent or summed into another. torch releases it at the wait, whichever stream that runs on,
    so code that waits on a side stream keeps this handle until the two streams have joined (`side_queue.py`)."""
    finish: Callable[[Tensor], Tensor] | None = None
    """Makes the result from what has arrived in the buffer."""

    def wait(self) -> Tensor:
        """Return the result."""
        if self.work is not None:
            self.work.wait()
        return self.partial if self.finish is None else self.finish(self.partial)

    def completed(self) -> "InFlight":
        """Wait, and return a handle of the result."""
        return InFlight(self.wait(), None)


Launch = Callable[[Tensor], InFlight]
"""Starts to sum a partial sum over the ranks, and takes ownership of it."""


def leave_unreduced(partial: Tensor) -> InFlight:
    """Return a handle of the partial sum itself: the `Launch` that starts nothing."""
    return InFlight(partial, None)


class _StartAllReduce(Function):
    """Forward starts the sum in place. Backward is the identity, because every rank has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: CommGroup) -> tuple[Tensor, Work | None]:
        ctx.mark_dirty(partial)
        return partial, group.start_all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return gradient, None


def start_all_reduce(partial: Tensor, group: CommGroup) -> InFlight:
    """Start to sum `partial` over `group` and return the handle; `partial` must not be used afterwards."""
    if group.size == 1:
        return InFlight(partial, None)
    if not torch.is_grad_enabled():
        return InFlight(partial, group.start_all_reduce(partial))
    return InFlight(*_StartAllReduce.apply(partial, group))
