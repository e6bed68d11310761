"""A pipeline stage as DeepSpeed sees it: one layer of its PipelineModule, which holds a range of the model.

Importing this file imports DeepSpeed, which must have been started before (`comm/launch.py`).
"""

import contextlib
import io
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.mpu import DeepSpeedMpu
from megatron_ladder.engine.pipeline_schedule import MicroBatch
from megatron_ladder.model.language_model import LanguageModel


class Stage(nn.Module):
    """A range of the model, called with what enters it.

    The loss belongs to the last stage's layer and not to DeepSpeed's `loss_fn`: its bf16 optimizer clears gradients
    when backward reaches the output of the layers, and would lose those of a head that stands behind them.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.coming: deque[MicroBatch] = deque()
        """The micro-batches whose forward passes are to come, in their order."""
        self.loss_scale = 1.0
        """What the loss of a micro-batch is multiplied by."""

    def forward(self, entering: Tensor) -> Tensor:
        """What the stage before sends, token ids [b, s] for the first one -> what the next one gets, or the loss.

        A state is [1 + pending, s, b, h].
        """
        _, labels, loss_mask, positions, document_bounds = self.coming.popleft()
        leaving = self.model.stage(entering, _at(entering.device, positions), document_bounds)
        if not self.model.is_last:
            return leaving
        loss_mask = _at(entering.device, loss_mask)
        return self.model.loss(leaving[0], labels.to(entering.device), loss_mask) * self.loss_scale


def _at(device: torch.device, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=True)


class StagedModel(PipelineModule):  # type: ignore[misc]
    """This rank's stage among the others', which it does not hold."""

    def __init__(self, model: LanguageModel, mesh: ProcessMesh) -> None:
        stage, pipeline = Stage(model), mesh.pipeline
        layers: list[nn.Module] = [nn.Identity() for _ in pipeline.ranks]
        layers[pipeline.rank] = stage
        # Its axes are pipeline, data, tensor, the last one fastest: the order of ProcessMesh.
        topology = PipeModelDataParallelTopology(num_pp=pipeline.size, num_mp=mesh.tensor.size, num_dp=mesh.data.size)
        # It prints what the run's own banner says.
        with contextlib.redirect_stdout(io.StringIO()), _groups_of(mesh):
            super().__init__(layers, topology=topology, partition_method="uniform")
        self.stage = stage
        self._mesh = mesh

    def mpu(self) -> DeepSpeedMpu:
        """The groups that gradients are reduced over: those of the mesh."""
        return DeepSpeedMpu(self._mesh)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup | None]]:
        """Weights whose gradients are summed over stages: the embedding that is the head as well."""
        model = self.stage.model
        if not (model.config.tie_embeddings and (model.is_first or model.is_last)):
            return []
        return [(model.embedding.weight, self._mesh.ends.process_group)]


@contextlib.contextmanager
def _groups_of(mesh: ProcessMesh) -> Iterator[None]:
    """Inside it, DeepSpeed gets the groups of the mesh where it would make more of the same.

    Its grid makes six for each rank, which on GPUs are communicators, and on CPUs threads that poll.
    """
    groups = (mesh.world, mesh.model, mesh.data, mesh.pipeline, mesh.tensor)
    process_groups = {tuple(sorted(group.ranks)): group.process_group for group in groups}

    def find(ranks: Iterable[int]) -> dist.ProcessGroup | None:
        wanted = tuple(sorted(ranks))
        return process_groups[wanted] if mesh.world.rank in wanted else None

    make = deepspeed.comm.new_group
    deepspeed.comm.new_group = find
    try:
        yield
    finally:
        deepspeed.comm.new_group = make


def build_pipeline_engine(
    model: LanguageModel, optimizer: torch.optim.Optimizer, config: dict[str, Any], mesh: ProcessMesh
) -> Any:
    """DeepSpeed's pipeline engine around this rank's stage."""
    engine, *_ = deepspeed.initialize(
        model=StagedModel(model, mesh), optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine
