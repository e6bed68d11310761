"""The face of the process mesh that DeepSpeed asks for (its `mpu` argument)."""

import torch.distributed as dist

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.comm.mesh import ProcessMesh


class DeepSpeedMpu:
    """Answers DeepSpeed's questions from the mesh; its method names are DeepSpeed's."""

    def __init__(self, mesh: ProcessMesh) -> None:
        """`mesh` is one that `ProcessMesh.build` made."""
        self._mesh = mesh

    @staticmethod
    def _process_group(group: CommGroup) -> dist.ProcessGroup:
        assert group.process_group is not None
        return group.process_group

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those that hold one model."""
        return self._mesh.model.rank

    def get_model_parallel_world_size(self) -> int:
        """Ranks that hold one model."""
        return self._mesh.model.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that hold one model."""
        return self._process_group(self._mesh.model)

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's slice of a layer."""
        return self._mesh.tensor.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """Slices of a layer."""
        return self._mesh.tensor.size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that share the layers."""
        return self._process_group(self._mesh.tensor)

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's stage."""
        return self._mesh.pipeline.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Stages."""
        return self._mesh.pipeline.size

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        """Ranks of successive stages."""
        return self._process_group(self._mesh.pipeline)

    def get_data_parallel_rank(self) -> int:
        """This rank's share of a batch."""
        return self._mesh.data.rank

    def get_data_parallel_world_size(self) -> int:
        """Shares of a batch."""
        return self._mesh.data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that hold equal weights."""
        return self._process_group(self._mesh.data)
