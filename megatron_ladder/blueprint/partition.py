"""Which layers each stage of a pipeline holds."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def uniform_partition(layers: int, stages: int) -> list[range]:
    """The same number of layers for each stage, one more for the first ones if it does not go even.

    The last stages are the ones to have less, since the head comes on top there.
    """
    least, more = divmod(layers, stages)
    bounds = accumulate((least + (stage < more) for stage in range(stages)), initial=0)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def balanced_partition(layers: Sequence[int], before: int, after: int, stages: int) -> list[range]:
    """Contiguous ranges, none empty, such that the heaviest stage is as light as can be.

    Args:
        layers: weight of each layer, at least one for each stage.
        before: weight that comes on top in the first stage.
        after: weight that comes on top in the last stage.
    """
    sums = list(accumulate(layers, initial=0))

    def weight(start: int, stop: int) -> int:
        return sums[stop] - sums[start] + before * (start == 0) + after * (stop == len(layers))

    # Of the first `stop` layers in the stages so far: the heaviest of these, and where each begins. Among equals
    # the earlier stages get less: of these more micro-batches are in flight.
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
