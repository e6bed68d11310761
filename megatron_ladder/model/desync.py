"""Desync residual, the one wiring outside of the rule: ranks keep streams of their own and sum them now and then.

With t ranks, x_r the stream of rank r, and y_r its partial sum of the output of a sub-block (arXiv 2501.06589):

    every n-th sub-block and the last    x   = sum over ranks of (y_r + x_r / t)      alike on all ranks
    any other                            x_r = x_r + y_r                              no communication

A norm that reads x is shared; one that reads x_r has a weight for each rank. So t is a part of the model.

Backward. Rank r has the gradient of the loss in what is its own: in x_r, in y_r, and in the weights that they met. A
column-parallel slice meets x_r of its own rank alone, so nothing is summed at its input. Sums arise at the borders:

    x becomes x_r on every rank          the gradient of x is the sum over ranks of those of x_r; the shared norm that
                                         reads x there meets every rank's slices, so that of its weight is a sum too
    x = sum over ranks (y_r + x_r / t)   with g the whole gradient of x, that of y_r is g and that of x_r is g / t

Hence one reduce forward and one backward for each interval: the sum, and the backward of going apart. The head sums
the gradient of its input itself, so behind the last sub-block nothing is summed again. The bias of an output that is
not summed entered x_0 alone, so all ranks take its gradient from rank 0 (`RowParallelLinear`); it and the norms of
queries and keys, where a model has them, are summed one by one.

Between a reduce and the read of its result there is nothing to compute, so every reduce is waited for at once, with
overlap or without.
"""

from collections.abc import Sequence

from torch import Tensor

from megatron_ladder.comm.inflight import start_all_reduce
from megatron_ladder.comm.regions import enter_tensor_parallel_region
from megatron_ladder.model.attention import SequenceContext
from megatron_ladder.model.sub_block import SubBlock


def walk_desync(
    stream: Tensor, steps: Sequence[SubBlock], synchronised: Sequence[bool], context: SequenceContext
) -> Tensor:
    """The stream [s, b, h] that enters a range -> the one that leaves it; either may be this rank's own.

    Args:
        synchronised: whether the stream is alike on all ranks: when it enters, and after each of the steps.
    """
    for step, before, after in zip(steps, synchronised[:-1], synchronised[1:], strict=True):
        norm_weight = None
        if before:
            stream, norm_weight = enter_tensor_parallel_region(step.group, stream, step.norm.weight)
        with step.named("forward"):
            partial = step.unreduced(stream, context, norm_weight)
        if not after:
            stream = stream + partial
            continue
        stream = start_all_reduce(partial + stream / step.group.size, step.group).wait()
    return stream
