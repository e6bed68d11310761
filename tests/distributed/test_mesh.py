"""The process mesh: the ranks of each group, and the timeouts of groups."""

from datetime import timedelta

import torch.distributed as dist

from megatron_ladder.comm.mesh import ProcessMesh
from tests.helpers.pool import GlooPools


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


def ranks_over_gloo() -> tuple[list[int], list[int]]:
    """Return the ranks that rank 0 of a model of four stages gathers, in a second and in a third group of them."""
    mesh = ProcessMesh.build(1, 4)
    first, second = (mesh.model.over_gloo(timedelta(seconds=5)).gather_objects(dist.get_rank()) for _ in "ab")
    return first, second


def test_stages_that_joined_other_groups_form_a_group_over_gloo(gloo_pools: GlooPools) -> None:
    """The first and the last stage have a group that those between them lack."""
    assert gloo_pools(4).run(ranks_over_gloo) == [([0, 1, 2, 3], [0, 1, 2, 3]), ([], []), ([], []), ([], [])]
