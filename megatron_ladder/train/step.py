"""One optimizer step, and one evaluation.

The loss of a global batch is the sum over its target tokens that count, divided by their number in the whole batch:
it depends neither on the micro-batch size nor on how many ranks share the batch. DeepSpeed averages gradients over
data-parallel ranks, so each rank's share of the sum is multiplied by their number first.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.engine.gradients import GradientPiece, clip_gradients, gradient_norm
from megatron_ladder.engine.pipeline_schedule import evaluate_batch, forward_backward, take_step
from megatron_ladder.errors import BadNumbersError
from megatron_ladder.train.guards import Finding, locate_bad_gradient, without_update
from megatron_ladder.train.setup import Trainer


class StepResult(NamedTuple):
    """What a step found."""

    loss_sum: Tensor
    """This rank's share of the loss, summed over its tokens and divided by those of the global batch; fp32. With
    several pipeline stages the last one has it, and it is zero on the others."""
    gradient_norm: float
    """Before clipping; not finite in a step that was left out."""
    learning_rate: float
    loss: float
    """The loss of the global batch, the same on every rank."""
    finding: Finding | None = None
    """What was wrong with the step."""
    wishes: Sequence[float] = ()
    """What ranks had to tell, summed over them."""

    @property
    def skipped(self) -> bool:
        """Whether the update was left out."""
        return self.finding is not None and self.finding.skipped


class Judgement(NamedTuple):
    """What is known of a step before its update."""

    norm: float
    loss: float
    finding: Finding | None
    wishes: Sequence[float]
    pieces: Sequence[GradientPiece]


def train_step(
    trainer: Trainer,
    micro_batches: Sequence[MicroBatch],
    iteration: int,
    wishes: Callable[[], Sequence[float]] = tuple,
) -> StepResult:
    """Forward and backward of every micro-batch, reduction, clipping, AdamW.

    Args:
        micro_batches: this rank's, on any device.
        iteration: number of this step, the first of the run being 1.
        wishes: gives what this rank has to tell the others, the same number of numbers on every rank.

    Raises:
        BadNumbersError: an fp16 gradient is not finite, and no lower loss scale could be the mend; the weights are as
            they were before the step.
    """
    engine = trainer.engine
    learning_rate = trainer.schedule.at(iteration)
    trainer.state.set_learning_rate(learning_rate)
    scale = 1.0 / max(count_targets(trainer, micro_batches), 1.0)
    data_parallel = trainer.mesh.data.size
    if trainer.mesh.pipeline.size > 1:
        loss_sum = forward_backward(engine, micro_batches, scale * data_parallel) / data_parallel
        judgement = _judge(trainer, iteration, loss_sum, wishes())
        with _updating(trainer, judgement):
            take_step(engine)
        return _result(trainer, loss_sum, learning_rate, judgement)
    loss_sum = torch.zeros((), device=trainer.device)
    for index, batch in enumerate(micro_batches):
        loss = engine(*_on_device(batch, trainer.device)) * scale
        loss_sum += loss.detach()
        engine.backward(loss * data_parallel, scale_wrt_gas=False)
        if index < len(micro_batches) - 1:
            engine.step()
    judgement = _judge(trainer, iteration, loss_sum, wishes())
    with _updating(trainer, judgement):
        engine.step()
    return _result(trainer, loss_sum, learning_rate, judgement)


def _judge(trainer: Trainer, iteration: int, loss_sum: Tensor, wishes: Sequence[float]) -> Judgement:
    """Clips the gradient, which is reduced, and says whether it may be used; all ranks find the same.

    The engine holds the gradient of the scaled loss and divides it by the scale within its step. In fp16 it leaves the
    step out by itself if the gradient is not finite and a lower scale may be the mend.
    """
    state, guard = trainer.state, trainer.guard
    pieces, scale = state.gradient_pieces(), state.loss_scale
    told = torch.tensor(wishes, dtype=torch.float64, device=trainer.device)
    riders = torch.cat([loss_sum.detach().double().reshape(1), told])
    scaled_norm, (losses, *sums) = gradient_norm(pieces, trainer.mesh.world, trainer.device, riders)
    # Every tensor-parallel rank has given the same loss.
    norm, loss = scaled_norm / scale, losses / trainer.mesh.tensor.size
    if math.isfinite(norm):
        clip_gradients(pieces, norm, trainer.run.optimizer.clip_grad)
    text = f"iteration {iteration}: the gradient's norm is {norm}, the loss {loss:g}"
    if trainer.run.training.fp16 and not math.isfinite(norm):
        if not state.can_lower_loss_scale():
            raise BadNumbersError(f"{text}, the loss scale {scale:g}")
        return Judgement(norm, loss, None, sums, pieces)
    kind, finding = guard.judge(loss, norm), None
    if kind == "bad numbers":
        where = locate_bad_gradient(pieces, trainer.model, trainer.mesh.world)
        text += ": first bad parameter {parameter}, on rank {rank}".format_map(where) if where else ""
        finding = Finding(kind, True, text, where)
    elif kind == "loss spike":
        finding = Finding(kind, guard.skips_spikes, f"{text}, which is a spike")
    return Judgement(norm, loss, finding, sums, pieces)


def _updating(trainer: Trainer, judgement: Judgement) -> AbstractContextManager[None]:
    """Around the engine's step: lets it update the weights, or not."""
    if judgement.finding is not None and judgement.finding.skipped:
        return without_update(trainer.state.base, judgement.pieces)
    return nullcontext()


def _result(trainer: Trainer, loss_sum: Tensor, learning_rate: float, judgement: Judgement) -> StepResult:
    norm, loss, finding, wishes, _ = judgement
    if trainer.state.overflowed():
        scale = trainer.state.loss_scale
        finding = Finding("overflow", True, f"overflow in fp16; loss scale {scale:g}", {"loss_scale": scale})
    return StepResult(loss_sum, norm, learning_rate, loss, finding, wishes)


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
