"""Which of a layout's groups cross from one box to another.

Ranks are numbered as `arange(world).view(pipeline, data, tensor)` (`comm/mesh.py`), and boxes take them in this order.
Stages are therefore the first to be in other boxes. TP 2, PP 4, DP 2 in boxes of eight:

    box        0                     1
    rank       0  1  2  3  4  5  6  7     8  9 10 11 12 13 14 15
    stage      0  .  .  .  1  .  .  .     2  .  .  .  3  .  .  .
    replica    0  .  1  .  0  .  1  .     0  .  1  .  0  .  1  .

Here both collectives stay in a box. Only stage 1 sends to another box, four GPUs at a time. Both replicas are in two
boxes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ladder_lab.cost.layout import Layout


class RankGroups(NamedTuple):
    """The groups of one rank; without others in a group, the rank alone."""

    tensor: range
    data: range
    experts: range
    """Expert-parallel ranks, between which tokens travel."""
    experts_data: range
    """Ranks that hold the same parts of routed experts."""
    previous: range
    """The rank of the previous stage that sends to this one, and this one. With chunks, the stages form a ring."""
    following: range
    """This rank, and the one of the next stage to which it sends."""
    ends: range
    """Ranks of the first and the last stage that hold the same slices, for tied embeddings."""


class Spread(NamedTuple):
    """How a group is spread over boxes."""

    boxes: int
    fewest: int
    """Number of ranks in the box with the fewest."""
    most: int
    sharing: int
    """Groups of its kind that cross the network out of one box at the same time, this one included."""


@dataclass(frozen=True)
class Placement:
    """The spreads of all groups of a layout, by kind."""

    tensor: frozenset[Spread]
    data: frozenset[Spread]
    experts: frozenset[Spread]
    experts_data: frozenset[Spread]
    following: frozenset[Spread]
    ends: frozenset[Spread]
    boxes_of_replica: int
    """The most boxes that the ranks of one copy of the model are in."""


def rank_groups(layout: Layout, rank: int) -> RankGroups:
    """Return the groups of a rank by the order of ranks at the top of this file."""
    of_stage = layout.tensor * layout.data
    first_of_last = layout.gpus - of_stage
    stage_start = rank - rank % of_stage
    tensor_start = rank - rank % layout.tensor
    alone = range(rank, rank + 1)
    is_end = first_of_last > 0 and not of_stage <= rank < first_of_last
    ends = range(rank % of_stage, layout.gpus, first_of_last) if is_end else alone
    around = ends if layout.chunks > 1 else alone
    data = range(stage_start + rank % layout.tensor, stage_start + of_stage, layout.tensor)
    experts_start = rank - (rank - stage_start) % layout.experts
    of_same_experts = range(stage_start + (rank - stage_start) % layout.experts, stage_start + of_stage, layout.experts)
    return RankGroups(
        tensor=range(tensor_start, tensor_start + layout.tensor),
        data=data,
        experts=range(experts_start, experts_start + layout.experts),
        experts_data=of_same_experts if layout.divides_experts else data,
        previous=range(rank - of_stage, rank + 1, of_stage) if rank >= of_stage else around,
        following=range(rank, rank + of_stage + 1, of_stage) if rank < first_of_last else around,
        ends=ends,
    )


def crosses(group: range, per_box: int) -> bool:
    """Return whether a group has ranks in several boxes."""
    return group[0] // per_box != group[-1] // per_box


def placement(layout: Layout, per_box: int) -> Placement:
    """Return where the groups of a layout are in boxes of so many GPUs."""
    return _placement(layout.tensor, layout.pipeline, layout.data, layout.chunks, layout.experts, per_box)


@lru_cache(maxsize=1024)
def _placement(tensor: int, pipeline: int, data: int, chunks: int, experts: int, per_box: int) -> Placement:
    layout = Layout(tensor, pipeline, data, chunks=chunks, experts=experts)
    groups = [rank_groups(layout, rank) for rank in range(layout.gpus)]
    replicas: list[set[int]] = [set() for _ in range(data)]
    for rank in range(layout.gpus):
        replicas[rank // tensor % data].add(rank // per_box)
    return Placement(
        tensor=_spreads((of_rank.tensor for of_rank in groups), per_box),
        data=_spreads((of_rank.data for of_rank in groups), per_box),
        experts=_spreads((of_rank.experts for of_rank in groups), per_box),
        experts_data=_spreads((of_rank.experts_data for of_rank in groups), per_box),
        # An adapter carries both directions at once, so only the senders of one direction share it.
        following=_spreads((of_rank.following for of_rank in groups), per_box, only_first=True),
        ends=_spreads((of_rank.ends for of_rank in groups), per_box),
        boxes_of_replica=max(map(len, replicas)),
    )


def _spreads(groups: Iterable[range], per_box: int, only_first: bool = False) -> frozenset[Spread]:
    """Return the spreads of groups that communicate at the same time; `only_first`: their first rank sends."""
    sharing: Counter[int] = Counter()
    shapes = set()
    for group in set(groups):
        ranks = Counter(rank // per_box for rank in group)
        shapes.add((len(ranks), min(ranks.values()), max(ranks.values())))
        if len(ranks) > 1:
            sharing.update([group[0] // per_box] if only_first else ranks.keys())
    most_sharing = max(sharing.values(), default=0)
    return frozenset(Spread(*shape, most_sharing) for shape in shapes)
