"""One optimizer step, and one evaluation.

The loss of a global batch is the sum over its target tokens that count, divided by their number in the whole batch:
it depends neither on the micro-batch size nor on how many ranks share the batch. DeepSpeed averages gradients over
data-parallel ranks, so each rank's share of the sum is multiplied by their number first.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.optim.gradients import clip_gradients, gradient_norm
from megatron_ladder.pipeline.schedule import evaluate_batch, forward_backward, take_step
from megatron_ladder.train.setup import Trainer


class StepResult(NamedTuple):
    """What a step found."""

    loss_sum: Tensor
    """This rank's share of the loss, summed over its tokens and divided by those of the global batch; fp32. With
    several pipeline stages the last one has it, and it is zero on the others."""
    gradient_norm: float
    """Before clipping; not finite in a step that was left out."""
    learning_rate: float
    skipped: bool = False
    """Whether the step was left out because an fp16 gradient overflowed; the loss scale is lower now."""


def train_step(trainer: Trainer, micro_batches: Sequence[MicroBatch], iteration: int) -> StepResult:
    """Forward and backward of every micro-batch, reduction, clipping, AdamW.

    Args:
        micro_batches: this rank's, on any device.
        iteration: number of this step, the first of the run being 1.

    Raises:
        BadNumbersError: the gradient is not finite, and no lower loss scale of fp16 could be the mend; the weights
            are as they were before the step.
    """
    engine = trainer.engine
    learning_rate = trainer.schedule.at(iteration)
    trainer.state.set_learning_rate(learning_rate)
    scale = 1.0 / max(count_targets(trainer, micro_batches), 1.0)
    data_parallel = trainer.mesh.data.size
    if trainer.mesh.pipeline.size > 1:
        loss_sum = forward_backward(engine, micro_batches, scale * data_parallel) / data_parallel
        norm = _clip(trainer, iteration, loss_sum)
        take_step(engine)
        return StepResult(loss_sum, norm, learning_rate)
    loss_sum = torch.zeros((), device=trainer.device)
    norm = 0.0
    for index, batch in enumerate(micro_batches):
        loss = engine(*_on_device(batch, trainer.device)) * scale
        loss_sum += loss.detach()
        engine.backward(loss * data_parallel, scale_wrt_gas=False)
        if index == len(micro_batches) - 1:
            norm = _clip(trainer, iteration, loss_sum)
        engine.step()
    return StepResult(loss_sum, norm, learning_rate, skipped=trainer.state.overflowed())


def _clip(trainer: Trainer, iteration: int, loss_sum: Tensor) -> float:
    """Clips the gradient, which is reduced, and returns the norm that it had.

    The engine holds the gradient of the scaled loss and divides it by the scale within its step. It leaves the step out
    by itself if the gradient is not finite and a lower scale may be the mend.
    """
    pieces, scale = trainer.state.gradient_pieces(), trainer.state.loss_scale
    norm = gradient_norm(pieces, trainer.mesh.world, trainer.device) / scale
    if math.isfinite(norm):
        clip_gradients(pieces, norm, trainer.run.optimizer.clip_grad)
    elif not trainer.state.can_lower_loss_scale():
        loss = trainer.mesh.pipeline.all_reduce(loss_sum.clone())
        text = f"iteration {iteration}: the gradient's norm is {norm}, the loss {loss:g}"
        raise BadNumbersError(f"{text}, the loss scale {scale:g}" if trainer.run.training.fp16 else text)
    return norm


def count_targets(trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> float:
    """Target tokens of the global batch that count, weighed by their masks; 0 on stages that have no targets."""
    data, pipeline = trainer.mesh.data, trainer.mesh.pipeline
    if pipeline.rank < pipeline.size - 1:
        return 0.0
    if all(batch.loss_mask is None for batch in micro_batches):
        return float(sum(batch.labels.numel() for batch in micro_batches) * data.size)
    counts = [
        float(batch.labels.numel()) if batch.loss_mask is None else float(batch.loss_mask.sum())
        for batch in micro_batches
    ]
    return float(data.all_reduce(torch.tensor(sum(counts), dtype=torch.float64, device=trainer.device)))


@torch.no_grad()
def evaluate(trainer: Trainer, batches: Iterator[list[MicroBatch]], global_batches: int) -> float:
    """The mean loss of a target token over so many global batches; the same on every rank."""
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.device)
    for _ in range(global_batches):
        micro_batches = next(batches)
        if trainer.mesh.pipeline.size > 1:
            sums[0] += evaluate_batch(trainer.engine, micro_batches)
        else:
            for batch in micro_batches:
                sums[0] += trainer.model(*_on_device(batch, trainer.device))
        sums[1] += count_targets(trainer, micro_batches) / trainer.mesh.data.size
    # Only the last stage knows either.
    loss, tokens = trainer.mesh.pipeline.all_reduce(trainer.mesh.data.all_reduce(sums))
    return float(loss / tokens)


def _on_device(batch: MicroBatch, device: torch.device) -> list[Tensor | None]:
    """All but the bounds of documents, which the model wants to count on the CPU."""
    *others, document_bounds = batch
    return [*(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in others), document_bounds]
