"""Pipeline stages, as one layer each of DeepSpeed's PipelineModule, and its schedules: 1F1B, and one pass to evaluate.

Importing this file imports DeepSpeed, which `engine/build.py` must have started before.
"""

import contextlib
import io
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.schedule import OptimizerStep
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron_ladder.comm.group import to_device
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.engine import Engine, ModelInputs, batch_to_device, deepspeed_mpu
from megatron_ladder.model.language_model import LanguageModel, LossScales


class _Stage(nn.Module):
    """A range of the model's layers.

    The stage computes the loss itself instead of using DeepSpeed's `loss_fn`, which only receives outputs and labels.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.coming: deque[ModelInputs] = deque()
        """The micro-batches that are still to be processed, in order."""
        self.loss_scale = self.body_loss_scale = torch.ones(())
        self.predictions: list[Tensor] | None = None
        """Receives the predictions of each micro-batch, whose loss is then not computed."""

    def forward(self, entering: Tensor) -> Tensor:
        """Map the previous stage's state [1 + pending, s, b, h], or ids [b, s], to this one's, or to the loss."""
        batch = batch_to_device(self.coming.popleft(), entering.device)
        _, labels, loss_mask, positions, lengths, document_bounds = batch
        leaving = self.model.stage(entering, positions, lengths, document_bounds, self.body_loss_scale)
        if not self.model.is_last:
            return leaving
        if self.predictions is None:
            loss = self.model.loss(leaving[0], labels, loss_mask)
            return loss * self.loss_scale.to(loss.dtype)
        self.predictions.append(self.model.predictions(leaving[0], labels))
        return leaving.new_zeros(())


class _StagedModel(PipelineModule):  # type: ignore[misc]
    """This rank's stage. Placeholders represent the other stages."""

    def __init__(self, model: LanguageModel, mesh: ProcessMesh) -> None:
        stage, pipeline = _Stage(model), mesh.pipeline
        layers: list[nn.Module] = [nn.Identity() for _ in pipeline.ranks]
        layers[pipeline.rank] = stage
        # Its axes are pipeline, data, tensor, the last one fastest, which is the order of ProcessMesh.
        topology = PipeModelDataParallelTopology(num_pp=pipeline.size, num_mp=mesh.tensor.size, num_dp=mesh.data.size)
        # DeepSpeed prints a description of the layers, which our banner contains already.
        with contextlib.redirect_stdout(io.StringIO()), _groups_of(mesh):
            super().__init__(layers, topology=topology, partition_method="uniform")
        self.stage = stage
        self._mesh = mesh

    def mpu(self) -> SimpleNamespace:
        """Return the process groups of the mesh, so that gradients are reduced over them."""
        return deepspeed_mpu(self._mesh)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup | None]]:
        """Return the weights whose gradients are summed over stages: an embedding that is the output head as well."""
        tied = self.stage.model.tied_weight
        return [] if tied is None else [(tied, self._mesh.ends.process_group)]


@contextlib.contextmanager
def _groups_of(mesh: ProcessMesh) -> Iterator[None]:
    """Give DeepSpeed the mesh's groups; it would create six more per rank, with communicators or polling threads."""
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


class PipelinedEngine(Engine):
    """Every rank holds the layers of one stage.

    DeepSpeed's `train_batch` would end with the optimizer step and clip by its own norm. This engine executes the same
    schedule without that step, so that the caller clips as in every other layout.
    """

    def _initialize(self, model: LanguageModel, **arguments: Any) -> Any:
        staged = _StagedModel(model, self._mesh)
        self._stage = staged.stage
        engine = deepspeed.initialize(model=staged, **arguments)[0]
        engine.pipeline_enable_backward_allreduce = self._sharded is None
        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, OptimizerStep: lambda engine: None}
        return engine

    def forward_backward(self, micro_batches: Sequence[ModelInputs], scales: LossScales) -> Tensor:
        count = self.wrapped.micro_batches
        assert len(micro_batches) == count
        # DeepSpeed divides the loss by the number of micro-batches.
        self._stage.loss_scale = scales.targets * self._gradient_divisor * count
        self._stage.body_loss_scale = scales.tokens * self._gradient_divisor
        self._stage.model.stack.partial_sums.expect(count)
        with self._reducing(count):
            loss_sum = self._run(self.wrapped._train_schedule(), micro_batches)
        return loss_sum / count / self._gradient_divisor

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[ModelInputs]) -> Tensor:
        self._stage.loss_scale = torch.ones(())
        return self._run(self.wrapped._inference_schedule(len(micro_batches)), micro_batches)

    @torch.no_grad()
    def predict(self, micro_batches: Sequence[ModelInputs]) -> Tensor:
        found: list[Tensor] = []
        self._stage.predictions = found
        try:
            self._run(self.wrapped._inference_schedule(len(micro_batches)), micro_batches)
        finally:
            self._stage.predictions = None
        batch, length = micro_batches[0][0].shape
        shape = (len(micro_batches), 2, length, batch)
        return torch.stack(found) if found else torch.zeros(shape, dtype=torch.float64, device=self._device)

    def step(self) -> None:
        self.wrapped._exec_optimizer_step()

    def _run(self, schedule: Any, micro_batches: Sequence[ModelInputs]) -> Tensor:
        # Every stage needs some tensors of each micro-batch, but DeepSpeed loads them on the first and last stage only.
        self._stage.coming = deque(micro_batches)
        # DeepSpeed would wait for each of its own copies to the device.
        self.wrapped.set_dataiterator((to_device(tokens, self._device), ()) for tokens, *_ in micro_batches)
        self.wrapped.total_loss, self.wrapped._compute_loss = None, True
        self.wrapped._exec_schedule(schedule)
        loss: Tensor | None = self.wrapped.total_loss
        return torch.zeros((), device=self._device) if loss is None else loss
