"""Where the groups of a layout are, by hand and by the reshape that defines the order of ranks."""

import pytest
import torch

from ladder_lab.cost.layout import Layout
from ladder_lab.cost.placement import Spread, placement, rank_groups


@pytest.mark.parametrize("sizes", [(2, 4, 2), (4, 1, 3), (1, 3, 4), (2, 2, 1), (1, 1, 1)])
def test_groups_are_those_of_the_mesh(sizes: tuple[int, int, int]) -> None:
    tensor, pipeline, data = sizes
    layout = Layout(tensor, pipeline, data)
    grid = torch.arange(layout.gpus).view(pipeline, data, tensor)
    for rank in range(layout.gpus):
        stage, replica, part = (int(index) for index in (grid == rank).nonzero()[0])
        stages, groups = grid[:, replica, part].tolist(), rank_groups(layout, rank)
        assert list(groups.tensor) == grid[stage, replica].tolist()
        assert list(groups.data) == grid[stage, :, part].tolist()
        assert list(groups.previous) == stages[max(stage - 1, 0) : stage + 1]
        assert list(groups.following) == stages[stage : stage + 2]
        is_end = pipeline > 1 and stage in (0, pipeline - 1)
        assert list(groups.ends) == ([stages[0], stages[-1]] if is_end else [rank])


@pytest.mark.parametrize("sizes", [(2, 3, 4, 4), (4, 2, 2, 2), (1, 2, 8, 4), (2, 2, 2, 2)])
def test_groups_of_experts_are_those_of_the_mesh(sizes: tuple[int, int, int, int]) -> None:
    tensor, pipeline, data, experts = sizes
    layout = Layout(tensor, pipeline, data, experts=experts)
    grid = torch.arange(layout.gpus).view(pipeline, -1, experts)
    for rank in range(layout.gpus):
        stage, group, part = (int(index) for index in (grid == rank).nonzero()[0])
        groups = rank_groups(layout, rank)
        assert list(groups.experts) == grid[stage, group].tolist()
        assert list(groups.experts_data) == grid[stage, :, part].tolist()


def test_stages_are_the_first_to_be_in_other_boxes() -> None:
    """The example of the module: stages 0 and 1 share a box, and so do stages 2 and 3."""
    found = placement(Layout(2, 4, 2), 8)
    pair = Spread(boxes=1, fewest=2, most=2, sharing=0)
    assert found.tensor == found.data == {pair}
    alone = Spread(1, 1, 1, 4)
    assert found.following == {alone, Spread(1, 2, 2, 4), Spread(2, 1, 1, 4)}
    # All eight ranks of the ends are in pairs of two boxes, four in each; those of stages 1 and 2 are alone.
    assert found.ends == {alone, Spread(2, 1, 1, 4)}
    assert found.boxes_of_replica == 2
    assert placement(Layout(2, 4, 2), 16).boxes_of_replica == 1


def test_tensor_parallel_groups_straddle_boxes() -> None:
    """Boxes of six hold ranks 0-3 and half of 4-7, then its other half and 8-11."""
    found = placement(Layout(4, 1, 3), 6)
    assert found.tensor == {Spread(1, 4, 4, 1), Spread(2, 2, 2, 1)}
    # Ranks 0, 4, 8: the first two in one box for tensor-parallel ranks 0 and 1, the last two for the others.
    assert found.data == {Spread(2, 1, 2, 4)}
    assert found.boxes_of_replica == 2
