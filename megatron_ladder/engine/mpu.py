"""The process mesh under the method names that DeepSpeed requires of its `mpu` argument."""

import torch.distributed as dist

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh


class DeepSpeedMpu:
    """Adapter from the mesh to the interface of Megatron's `mpu`."""

    def __init__(self, mesh: ProcessMesh) -> None:
        """`mesh` must come from `ProcessMesh.build`, so that its groups have process groups."""
        self._mesh = mesh

    @staticmethod
    def _process_group(group: CommGroup) -> dist.ProcessGroup:
        assert group.process_group is not None
        return group.process_group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that hold one model."""
        return self._mesh.model.rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that hold one model."""
        return self._mesh.model.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of ranks that hold one model."""
        return self._process_group(self._mesh.model)

    def get_tensor_model_parallel_rank(self) -> int:
        """Return the index of this rank's slice of a layer."""
        return self._mesh.tensor.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return the number of slices of a layer."""
        return self._mesh.tensor.size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of ranks that share the layers."""
        return self._process_group(self._mesh.tensor)

    def get_pipeline_model_parallel_rank(self) -> int:
        """Return the index of this rank's stage."""
        return self._mesh.pipeline.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self._mesh.pipeline.size

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of ranks that hold successive stages."""
        return self._process_group(self._mesh.pipeline)

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank's share of a batch."""
        return self._mesh.data.rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of shares of a batch."""
        return self._mesh.data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of ranks that hold equal weights."""
        return self._process_group(self._mesh.data)
