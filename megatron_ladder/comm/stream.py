"""How the tensor-parallel ranks share the residual stream, and the collectives at its two borders.

With t ranks, s positions, b samples and h features, a sub-block multiplies the whole of what it reads with its own
slice of a weight, and ends in a partial sum of its output. So there is a border before it and one behind it:

                          the stream       start_read: what is read       start_write: what is added
    ReplicatedStream      [s, b, h]        as it is                       an all-reduce
    ShardedStream         [s/t, b, h]      an all-gather to [s, b, h]     a reduce-scatter to [s/t, b, h]

An all-reduce is a reduce-scatter and an all-gather, so both send as many bytes; sharded, a rank normalises, adds and
keeps for backward only its own positions. Gradients meet the borders the other way round and need the same two
operations: that of an output is read, that of an input is written.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd import Function

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.comm.inflight import InFlight, start_all_reduce
from megatron_ladder.comm.regions import copy_to_tensor_parallel_region


class StreamLayout(Protocol):
    """The two borders. Both are differentiable; their gradients are waited for where they arise."""

    shards: int
    """Parts that the sequence is cut into."""

    def start_read(self, stream: Tensor) -> InFlight:
        """This rank's [s / shards, b, h] -> [s, b, h], equal on all ranks."""

    def start_write(self, partial: Tensor) -> InFlight:
        """This rank's partial sum [s, b, h] -> this rank's part of the sum; `partial` must not be used any more."""

    def enter(self, stream: Tensor) -> Tensor:
        """What is read, at once, and such that its gradient is summed: for a layer that does not sum it itself."""


class ReplicatedStream:
    """Every rank holds all positions."""

    shards = 1

    def __init__(self, group: CommGroup) -> None:
        self.group = group

    def start_read(self, stream: Tensor) -> InFlight:
        """The stream itself."""
        return InFlight(stream, None)

    def start_write(self, partial: Tensor) -> InFlight:
        """The sum over the ranks, in place."""
        return start_all_reduce(partial, self.group)

    def enter(self, stream: Tensor) -> Tensor:
        """The stream itself; backward is an all-reduce."""
        return copy_to_tensor_parallel_region(stream, self.group)


class ShardedStream:
    """Every rank holds s/t neighbouring positions, in rank order (sequence parallelism, arXiv 2205.05198)."""

    def __init__(self, group: CommGroup) -> None:
        self.group = group
        self.shards = group.size

    def start_read(self, stream: Tensor) -> InFlight:
        """All ranks' positions."""
        return InFlight(*_StartAllGather.apply(stream, self.group))

    def start_write(self, partial: Tensor) -> InFlight:
        """This rank's positions of the sum over the ranks."""
        rows, work = _StartReduceScatter.apply(partial, self.group)
        return InFlight(rows, None if work is None else _Holding(work, partial))

    def enter(self, stream: Tensor) -> Tensor:
        """All ranks' positions; backward is a reduce-scatter."""
        return self.start_read(stream).wait()


class _Holding(NamedTuple):
    """A handle that keeps what is summed elsewhere.

    torch lets go of it when it is waited for, on whatever stream that is; who waits on a stream beside the one that
    computes keeps the handle until both have met (`comm/aside.py`).
    """

    work: Work
    partial: Tensor

    def wait(self) -> object:
        return self.work.wait()


class _StartAllGather(Function):
    """Forward: starts the gather. Backward: each rank used all positions, so their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: CommGroup) -> tuple[Tensor, Any]:
        ctx.group = group
        return group.start_all_gather(shard.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return InFlight(*ctx.group.start_reduce_scatter(gradient.contiguous())).wait(), None


class _StartReduceScatter(Function):
    """Forward: starts the sum. Backward: every rank's partial sum has the sum's gradient, at all positions."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: CommGroup) -> tuple[Tensor, Any]:
        ctx.group = group
        return group.start_reduce_scatter(partial.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return InFlight(*ctx.group.start_all_gather(gradient.contiguous())).wait(), None
