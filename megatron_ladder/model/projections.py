"""The matrices of a sub-block as the tensor-parallel ranks share them.

The normed stream is multiplied with one column-parallel matrix, in which several canonical ones lie side by side; what
is added to the residual stream comes from a row-parallel one.
"""

import torch

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.tensors import Branch, SubBlockTensors
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.parallel.linear import ColumnParallelLinear, RowParallelLinear


def input_projection(
    config: ModelConfig, tensors: SubBlockTensors, mesh: ProcessMesh, dtype: torch.dtype, device: torch.device
) -> ColumnParallelLinear:
    """Return the product from the normed stream to the inputs of all branches."""
    return ColumnParallelLinear(
        [matrix for branch in tensors.branches for matrix in branch.inputs],
        group=mesh.tensor,
        kv_replica_group=mesh.kv_replica,
        dtype=dtype,
        device=device,
        sum_input_gradient=config.wiring.stream == "shared" and mesh.stream.shards == 1,
    )


def output_projection(
    tensors: SubBlockTensors, branch: Branch, mesh: ProcessMesh, dtype: torch.dtype, device: torch.device
) -> RowParallelLinear:
    """Return the product from a branch back to the residual stream."""
    return RowParallelLinear(
        branch.output,
        group=mesh.tensor,
        layout=mesh.stream,
        dtype=dtype,
        device=device,
        equal_gradients=tensors.wired.leaves_shared,
    )
