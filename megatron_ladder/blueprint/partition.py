"""Partitions of the layers over the stages of a pipeline."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def uniform_partition(layers: int, stages: int) -> list[range]:
    """Return equal ranges; if the layers do not divide evenly, the first stages have one more.

    The last stages have fewer layers, since the last one also has the head.
    """
    least, more = divmod(layers, stages)
    bounds = accumulate((least + (stage < more) for stage in range(stages)), initial=0)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def balanced_partition(layers: Sequence[int], before: int, after: int, stages: int) -> list[range]:
    """Return contiguous, non-empty ranges that minimise the weight of the heaviest stage.

    `layers` are weights, at least one per stage; `before` and `after` add to the first and the last stage.
    """
    sums = list(accumulate(layers, initial=0))

    def weight(start: int, stop: int) -> int:
        return sums[stop] - sums[start] + before * (start == 0) + after * (stop == len(layers))

    # For the first `stop` layers in the stages so far: the weight of the heaviest stage, and each stage's start. Ties
    # give earlier stages fewer layers, because these hold more micro-batches in flight.
    best: dict[int, tuple[int, tuple[int, ...]]] = {stop: (weight(0, stop), (0,)) for stop in range(1, len(layers) + 1)}
    for stage in range(1, stages):
        best = {
            stop: min(
                (max(best[start][0], weight(start, stop)), (*best[start][1], start)) for start in range(stage, stop)
            )
            for stop in range(stage + 1, len(layers) + 1)
        }
    starts = best[len(layers)][1]
    return [range(start, stop) for start, stop in pairwise((*starts, len(layers)))]
