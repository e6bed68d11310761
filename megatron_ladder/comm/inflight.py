"""A partial sum whose all-reduce is under way: what a row-parallel layer returns.

Timeline of two ladder sub-blocks, time running to the right (`~~~` is the wire):

    compute   [ h_0(r) ][ h_1(r) ][ h_2(r + y_0) ][ ...
    wire                ~~ y_0 ~~ ~~ y_1 ~~
                        ^ start_all_reduce(partial of h_0)
                                  ^ wait(): y_0 is there, h_1 hid it

The buffer belongs to the handle until `wait`: nothing else may read or write it, and autograd has saved no
alias of it (the output of a matrix product is not needed by its own backward).

On CUDA the reduce is on a stream of NCCL's, and memory that the compute stream's allocator gave must not go back while
it is used there. With `async_op=True` torch keeps the tensor itself until `Work.wait` has made the current stream wait
for NCCL's (since 2.8 always; its `record_stream` calls and TORCH_NCCL_AVOID_RECORD_STREAMS are gone), and lets go of it
when it sees the collective done where nobody waits. So no `record_stream` is needed here, under one condition that both
walks keep: a handle is waited for on the stream that computes, from which the buffer came and on which its memory is
used again. Reads of a sharded stream are waited for beside it; what `aside.py` holds for them takes its place.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from megatron_ladder.comm.group import CommGroup, Work


class InFlight(NamedTuple):
    """A tensor that is being summed over a group in place.

    A NamedTuple, since ZeRO-3's hooks find tensors only in tuples, lists and dictionaries.
    """

    partial: Tensor
    """This rank's partial sum until the reduce is done, then the sum."""
    work: Work | None
    """The reduce's handle; None when there is nothing to wait for."""

    def wait(self) -> Tensor:
        """The reduced tensor."""
        if self.work is not None:
            self.work.wait()
        return self.partial


class _StartAllReduce(Function):
    """Forward: starts the sum in place. Backward: identity, since every rank holds the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: CommGroup) -> tuple[Tensor, Work | None]:
        ctx.mark_dirty(partial)
        return partial, group.start_all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return gradient, None


def start_all_reduce(partial: Tensor, group: CommGroup) -> InFlight:
    """Starts to sum `partial` over `group` and returns the handle; `partial` must not be used any more."""
    if group.size == 1:
        return InFlight(partial, None)
    return InFlight(*_StartAllReduce.apply(partial, group))
