"""The process mesh: the ranks of each group; and a directory that they do not share."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ladder import torch_private
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.errors import UserError
from megatron_ladder.torch_private import process_groups, recorded_collectives
from megatron_ladder.train.setup import _check_shared
from tests.helpers.pool import GlooPools
from tests.helpers.sharded import mesh_of


def members() -> dict[str, tuple[int, ...]]:
    """Return the ranks of this rank's groups, in a mesh of two stages of two tensor-parallel ranks."""
    mesh = ProcessMesh.build(2, 2)
    names = ("world", "tensor", "data", "pipeline", "model")
    return {name: getattr(mesh, name).ranks for name in names}


def test_neighbours_are_tensor_parallel(gloo_pools: GlooPools) -> None:
    for rank, groups in enumerate(gloo_pools(4).run(members)):
        assert groups == {
            "world": (0, 1, 2, 3),
            "tensor": (0, 1) if rank < 2 else (2, 3),
            "data": (rank,),
            "pipeline": (rank % 2, rank % 2 + 2),
            "model": (0, 1, 2, 3),
        }


def expert_members(tensor: int, pipeline: int, experts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks with other experts than this rank's, and those with the same."""
    mesh = ProcessMesh.build(tensor, pipeline, expert_parallel=experts)
    # A collective shows that the members of a group agree.
    for group in (mesh.experts, mesh.experts_data):
        assert group.all_reduce(torch.ones(1)).item() == group.size
        assert group.ranks[group.rank] == dist.get_rank() or group.size == 1
    return mesh.experts.ranks, mesh.experts_data.ranks


@pytest.mark.parametrize(
    ("layout", "experts", "experts_data"),
    [
        ((1, 1, 2), [(0, 1), (2, 3)], [(0, 2), (1, 3)]),
        ((1, 1, 4), [(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)]),
        ((2, 1, 2), [(0, 1), (2, 3)], [(0, 2), (1, 3)]),
        ((2, 1, 4), [(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)]),
        ((4, 1, 2), [(0, 1), (2, 3)], [(0, 2), (1, 3)]),
        ((1, 2, 2), [(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)]),
        ((2, 1, 1), [(0,), (1,), (2,), (3,)], [(0, 2), (1, 3)]),
    ],
)
def test_neighbours_of_a_stage_divide_the_experts(
    gloo_pools: GlooPools,
    layout: tuple[int, int, int],
    experts: list[tuple[int, ...]],
    experts_data: list[tuple[int, ...]],
) -> None:
    for rank, of_rank in enumerate(gloo_pools(4).run(expert_members, *layout)):
        expected = (next(row for row in rows if rank in row) for rows in (experts, experts_data))
        assert of_rank == tuple(expected)


def ranks_over_gloo() -> tuple[list[int], list[int]]:
    """Return the ranks that rank 0 of a model of four stages gathers, in a second and in a third group of them."""
    mesh = ProcessMesh.build(1, 4)
    first, second = (mesh.model.over_gloo(timedelta(seconds=5)).gather_objects(dist.get_rank()) for _ in "ab")
    return first, second


def test_stages_that_joined_other_groups_form_a_group_over_gloo(gloo_pools: GlooPools) -> None:
    """The first and the last stage have a group that those between them lack."""
    assert gloo_pools(4).run(ranks_over_gloo) == [([0, 1, 2, 3], [0, 1, 2, 3]), ([], []), ([], []), ([], [])]


def errors_of_save(folders: list[Path]) -> tuple[str, ...]:
    """On each rank: return the errors if every rank has its own directory."""
    save = folders[dist.get_rank()]
    try:
        _check_shared(save, mesh_of(2).world)
    except UserError as error:
        return error.messages
    return ()


def test_a_directory_that_is_not_shared_is_rejected(gloo_pools: GlooPools, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert gloo_pools(2).run(errors_of_save, [folders[0]] * 2) == [(), ()]
    for (message,) in gloo_pools(2).run(errors_of_save, folders):
        assert message.startswith("--save ") and "do not see the same directory" in message
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def groups_and_records(is_old: bool) -> tuple[int, int]:
    """Return the numbers of known groups and recorded collectives of a rank that has joined three groups."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=first)
    with pytest.MonkeyPatch.context() as patch:
        if is_old:
            patch.setattr(torch_private, "distributed_c10d", object())
            patch.delattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
        known, recorded = process_groups(), recorded_collectives().get("entries", [])
    assert dist.group.WORLD in known and (is_old or {first, second} <= {*known})
    return len(known), len(recorded)


def test_groups_and_collectives_are_optional(gloo_pools: GlooPools) -> None:
    for known, recorded in gloo_pools(2).run(groups_and_records, False):
        assert known >= 3 and recorded > 0
    assert gloo_pools(2).run(groups_and_records, True) == [(1, 0)] * 2
