"""The process mesh: who is in which group, and how long a group waits."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_ladder.comm.mesh import ProcessMesh
from tests.distributed.pool import GlooPools


def members() -> dict[str, tuple[int, ...]]:
    """On each rank: the ranks of its groups, in a mesh of two tensor-parallel ranks in each of two stages."""
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


def waits_for_a_late_peer() -> float | None:
    """On rank 0: seconds until a reduce with a peer that does not come is an error."""
    mesh = ProcessMesh.build(2, timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(4)
        return None
    began = time.monotonic()
    try:
        mesh.tensor.all_reduce(torch.ones(2))
    except RuntimeError:
        return time.monotonic() - began
    return None


def test_every_group_has_the_runs_timeout(gloo_pools: GlooPools) -> None:
    waited, _ = gloo_pools(2).run(waits_for_a_late_peer)
    assert waited is not None and 0.9 <= waited < 4
