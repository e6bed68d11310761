"""The desync wiring, the only one outside the rule of `stack.py`: ranks keep separate streams and sum them at times.

With t ranks, x_r the stream of rank r, and y_r its partial sum of a sub-block's output (arXiv 2501.06589):

    every n-th sub-block and the last    x   = sum over ranks of (y_r + x_r / t)      equal on all ranks
    any other                            x_r = x_r + y_r                              no communication

The rule adds an output to the stream; here a reduce replaces the stream. Hence desync has its own walk, which shares
only the sub-blocks. A norm that reads x is shared; one that reads x_r has a weight per rank, so t is part of the model.

Backward. Rank r has the gradient of the loss in its own tensors: in x_r, in y_r, and in the weights applied to them. A
column-parallel slice reads x_r of its own rank only, so nothing is summed at its input. Sums arise at the borders:

    x becomes x_r on every rank          the gradient of x is the sum over ranks of those of x_r; the shared norm that
                                         reads x there feeds every rank's slices, so its weight's gradient is summed too
    x = sum over ranks (y_r + x_r / t)   with g the complete gradient of x, that of y_r is g and that of x_r is g / t

Hence there is one reduce forward and one backward per interval. The head sums the gradient of its input itself, so
after the last sub-block nothing is summed again. The bias of an output that is not summed entered x_0 only, so all
ranks take its gradient from rank 0 (`RowParallelLinear`). These biases, and the norms of queries and keys, are
communicated one by one.

There is nothing to compute between a reduce and the read of its result, so every reduce is waited for at once, with
overlap or without.
"""

from collections.abc import Sequence

from torch import Tensor

from megatron_ladder.comm.inflight import start_all_reduce
from megatron_ladder.comm.regions import enter_tensor_parallel_region
from megatron_ladder.model.sub_block import SequenceContext, SubBlock


def walk_desync(
    stream: Tensor, steps: Sequence[SubBlock], synchronised: Sequence[bool], context: SequenceContext
) -> Tensor:
    """Map the stream [s, b, h] that enters a range to the one that leaves it; either may be this rank's own.

    `synchronised` is whether the stream is equal on all ranks: when it enters, and after each step.
    """
    for step, before, after in zip(steps, synchronised[:-1], synchronised[1:], strict=True):
        norm_weight = None
        if before:
            stream, norm_weight = enter_tensor_parallel_region(step.group, stream, step.norm.weight)
        with step.named("forward"):
            partial, losses = step.partial_sum(stream, context, norm_weight)
        assert not losses, "ranks with separate streams have different losses"
        if not after:
            stream = stream + partial
            continue
        stream = start_all_reduce(partial + stream / step.group.size, step.group).wait()
    return stream
