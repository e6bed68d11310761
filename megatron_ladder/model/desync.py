"""The desync wiring, the only one outside the rule of `sub_block.py`: ranks have separate streams, summed at times.

With t ranks, x_r the stream of rank r, and y_r its partial sum of a sub-block's output (arXiv 2501.06589):

    every n-th sub-block and the last    x   = sum over ranks of (y_r + x_r / t)      equal on all ranks
    any other                            x_r = x_r + y_r                              no communication

A norm that reads x is shared; one that reads x_r has a weight per rank, so t is part of the model. Every reduce is
waited for at once, because its result is read at once.

Backward. Rank r has the gradient of the loss in its own tensors, so sums arise at the borders only:

    x becomes x_r on every rank          the gradient of x, and of the norm that reads it, is the sum over ranks
    x = sum over ranks (y_r + x_r / t)   with g the complete gradient of x, that of y_r is g and that of x_r is g / t

The head sums the gradient of its input itself, so after the last sub-block nothing is summed again. The bias of an
output that is not summed entered x_0 only, so all ranks take its gradient from rank 0 (`RowParallelLinear`).
"""

from collections.abc import Sequence

from torch import Tensor

from megatron_ladder.comm.inflight import start_all_reduce
from megatron_ladder.comm.stream import enter_tensor_parallel_region
from megatron_ladder.model.sub_block import SequenceContext, SubBlock


def walk_desync(stream: Tensor, steps: Sequence[SubBlock], context: SequenceContext) -> Tensor:
    """Map the stream [s, b, h] that enters a range to the one that leaves it; either may be this rank's own."""
    for step in steps:
        norm_weight = None
        if step.wired.reads_shared:
            stream, norm_weight = enter_tensor_parallel_region(step.group, stream, step.norm.weight)
        with step.named("forward"):
            (partial, stats, _), _ = step.compute(stream, context, norm_weight)
        assert not stats.losses, "ranks with separate streams have different losses"
        if step.wired.leaves_shared:
            stream = start_all_reduce(partial + stream / step.group.size, step.group).wait()
        else:
            stream = stream + partial
    return stream
