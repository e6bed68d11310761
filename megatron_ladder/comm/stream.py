"""How the tensor-parallel ranks share the residual stream, and the collectives at its two borders.

With t ranks, s positions, b samples and h features, a sub-block multiplies its whole input with its slice of a weight,
and ends in a partial sum of its output. So there is a border before and after each sub-block:

                          stream           start_read                      start_write
    StreamLayout          [s, b, h]        identity                        all-reduce
    ShardedStream         [s/t, b, h]      all-gather to [s, b, h]         reduce-scatter to [s/t, b, h]

An all-reduce is a reduce-scatter followed by an all-gather, so both layouts send the same number of bytes. Sharded, a
rank norms, adds and keeps for backward only its own positions. Gradients cross the borders in the opposite direction
with the same two operations: the gradient of an output is read, that of an input is written.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.comm.inflight import InFlight, start_all_reduce
from megatron_ladder.comm.regions import copy_to_tensor_parallel_region


class StreamLayout:
    """The two borders, where every rank holds all positions.

    Both are differentiable; the collectives of their backward are waited for at once.
    """

    shards = 1
    """Number of parts of the sequence."""

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
        return InFlight(*_StartAllGather.apply(stream, self.group))

    def start_write(self, partial: Tensor) -> InFlight:
        rows, work = _StartReduceScatter.apply(partial, self.group)
        return InFlight(rows, None if work is None else _Holding(work, partial))

    def enter(self, stream: Tensor) -> Tensor:
        return self.start_read(stream).wait()


class _Holding(NamedTuple):
    """A handle that keeps the tensor that is being summed.

    torch releases it at the wait, whichever stream that runs on. Code that waits on a side stream therefore keeps the
    handle until the two streams have joined (`side_queue.py`).
    """

    work: Work
    partial: Tensor

    def wait(self) -> object:
        return self.work.wait()


class _StartAllGather(Function):
    """Forward starts the gather. In backward, each rank used all positions, so their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: CommGroup) -> tuple[Tensor, Any]:
        ctx.group = group
        return group.start_all_gather(shard.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return InFlight(*ctx.group.start_reduce_scatter(gradient.contiguous())).wait(), None


class _StartReduceScatter(Function):
    """Forward starts the sum. In backward, every rank's partial sum gets the gradient of the sum at all positions."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: CommGroup) -> tuple[Tensor, Any]:
        ctx.group = group
        return group.start_reduce_scatter(partial.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return InFlight(*ctx.group.start_all_gather(gradient.contiguous())).wait(), None
