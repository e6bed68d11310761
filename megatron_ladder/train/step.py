"""One optimizer step, and one evaluation.

The loss of a global batch is the sum over its unmasked target tokens, divided by their number in the whole batch, so it
depends neither on the micro-batch size nor on the number of ranks that share the batch. The losses of bodies are means
over the tokens without padding, likewise. Every rank reads its batches, and so knows both numbers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import to_device
from megatron_ladder.data.batches import MicroBatch
from megatron_ladder.engine.optimizer import learning_rate
from megatron_ladder.engine.state import (
    Gradients,
    clip_gradients,
    gradient_norm,
    locate_bad_gradient,
    sum_partial_gradients,
)
from megatron_ladder.model.language_model import LossScales
from megatron_ladder.model.mtp import shift_targets
from megatron_ladder.model.stats import StepStats
from megatron_ladder.parallel.vocabulary import IGNORED
from megatron_ladder.train.guards import Finding
from megatron_ladder.train.setup import Trainer


class StepResult(NamedTuple):
    """The outcome of a step."""

    gradient_norm: float
    """Norm before clipping; may be infinite or NaN in a skipped step."""
    learning_rate: float
    loss: float
    """The loss of the global batch, the same on every rank."""
    extra_losses: Mapping[str, float]
    """`LanguageModel.extra_losses` of the global batch by name, the same on every rank."""
    loads: Tensor
    """How many tokens of the global batch chose each expert, [layers with experts, E], on the host of every rank."""
    finding: Finding | None = None
    extra_sums: Sequence[float] = ()
    pipeline_idle: float | None = None
    """Mean share of the previous step's time in passes that a stage waited for others; None if it is not known."""
    expert_capacity: int | None = None
    """Rows per expert and rank with which the step was repeated, because an expert needed more; None: it was not."""

    @property
    def skipped(self) -> bool:
        """Whether the weights were not updated."""
        return self.finding is not None and self.finding.skipped


def train_step(
    trainer: Trainer,
    micro_batches: Sequence[MicroBatch],
    iteration: int,
    extra_numbers: Callable[[], Sequence[float]] = tuple,
    meanwhile: Callable[[], None] = lambda: None,
) -> StepResult:
    """Run forward and backward of this rank's micro-batches, reduce and clip the gradient, and update the weights.

    `iteration` counts from 1. `extra_numbers` returns equally many numbers on every rank, which are summed with the
    gradient norm's collective. The host waits for the device only to read its result; `meanwhile` is called before,
    when the device has the passes to compute. A step in which an expert needs more rows than it has is repeated.
    """
    engine, model, mesh, guard = trainer.engine, trainer.model, trainer.mesh, trainer.guard
    rate = learning_rate(trainer.run.optimizer, trainer.run.training.train_iters, iteration)
    engine.optimizer.set_learning_rate(rate)
    counts = _count_tokens(trainer, micro_batches)
    targets, tokens, *_ = reciprocals = counts.clamp(min=1.0).reciprocal()
    scales = LossScales(targets, tokens, reciprocals[2:])

    # The device has run the passes of the previous step, because the host has read its result.
    busy_seconds, whole_seconds = engine.clock.seconds()
    pass_seconds = busy_seconds, whole_seconds * (mesh.pipeline.rank == 0)

    # Forward and backward of all micro-batches. Gradients are reduced under the last backward pass.
    stats = engine.train(micro_batches, scales)
    meanwhile()
    rank_numbers = torch.tensor([*pass_seconds, *extra_numbers()], dtype=torch.float64)
    numbers = torch.cat([counts[:1], to_device(rank_numbers, trainer.device)])
    sums = _sum_over_ranks(trainer, stats, scales, numbers)

    # Without finite numbers, no update follows, whatever further rows contain.
    expert_capacity = None
    while sums.lacks_rows and math.isfinite(sums.norm) and math.isfinite(sums.loss):
        expert_capacity = _raise_expert_capacity(trainer, stats)
        stats = engine.train(micro_batches, scales)
        sums = _sum_over_ranks(trainer, stats, scales, numbers)
    gradients, norm, loss = sums.gradients, sums.norm, sums.loss
    target_count, busy_seconds, whole_seconds, *extra_sums = sums.numbers
    # All ranks but those of the first stage, where a step begins and ends, contributed no whole seconds.
    idle = 1 - busy_seconds / (whole_seconds * mesh.pipeline.size) if whole_seconds and mesh.pipeline.size > 1 else None

    # All ranks judge the same numbers.
    finding = None
    text = f"iteration {iteration}: the gradient's norm is {norm}, the loss {loss:g}"
    kind = guard.judge(loss, norm, target_count > 0)
    if kind == "bad numbers":
        where = locate_bad_gradient(gradients, model, mesh.world)
        text += ": first bad parameter {parameter}, on rank {rank}".format_map(where) if where else ""
        finding = Finding(kind, True, text, where)
    elif kind == "no targets":
        finding = Finding(kind, True, f"iteration {iteration}: no token of the global batch counts in the loss")
    elif kind == "loss spike":
        finding = Finding(kind, guard.skips_spikes, f"{text}, which is a spike")

    result = StepResult(norm, rate, loss, sums.extra_losses, sums.loads, finding, extra_sums, idle, expert_capacity)
    if result.skipped:
        engine.optimizer.discard_gradients()
    else:
        clip_gradients(gradients, norm, trainer.run.optimizer.clip_grad)
        engine.optimizer.step()
        model.follow_loads(sums.loads, trainer.run.training.moe_router_bias_update_rate)
    return result


class _Sums(NamedTuple):
    """Sums over all ranks of what the passes of a step have computed; see `StepResult`."""

    gradients: Gradients
    norm: float
    loss: float
    extra_losses: Mapping[str, float]
    loads: Tensor
    lacks_rows: bool
    """Whether an expert needed more rows than it has, so that the step has to be repeated."""
    numbers: Sequence[float]


def _sum_over_ranks(trainer: Trainer, stats: StepStats, scales: LossScales, numbers: Tensor) -> _Sums:
    """Sum gradients, what the passes of each rank counted, and further numbers, [n] fp64 on the device."""
    model, mesh = trainer.model, trainer.mesh
    # Tensor-parallel ranks sum their parts of the gradients of weights that they all hold.
    gradients = trainer.engine.optimizer.gradients()
    sum_partial_gradients(gradients, mesh, trainer.device)

    # One collective sums the gradient's norm, losses, loads of experts, counts and times over all ranks.
    extra_losses = model.mean_losses(stats.losses, scales)
    replicated = torch.cat([stats.loss.double().reshape(1), extra_losses, stats.loads.double().flatten()])
    lacks_rows = (stats.most_rows > (model.expert_capacity or 0)).double().reshape(1)
    packed = torch.cat([replicated, lacks_rows, numbers])
    norm, sums = gradient_norm(gradients, mesh.world, trainer.device, packed)
    # Every tensor-parallel rank contributed the same losses and loads.
    loss, *others = (summed / mesh.tensor.size for summed in sums[: len(replicated)])
    ranks_that_lack_rows, *summed_numbers = sums[len(replicated) :]
    named_losses = dict(zip(model.extra_losses, others, strict=False))
    loads = torch.tensor(others[len(named_losses) :], dtype=torch.float64).view(stats.loads.shape)
    # Without a number of rows to exceed, a dry run, whose numbers are all 1, would repeat its step for ever.
    is_short = model.expert_capacity is not None and ranks_that_lack_rows > 0
    return _Sums(gradients, norm, loss, named_losses, loads, is_short, summed_numbers)


def _raise_expert_capacity(trainer: Trainer, stats: StepStats) -> int:
    """Give every expert an eighth more rows of each rank than one has needed, and return their number.

    Layers that read outputs without the missing rows may have needed too few.
    """
    needed = int(trainer.mesh.world.all_reduce(stats.most_rows, dist.ReduceOp.MAX))
    rows = needed + math.ceil(needed / 8)
    trainer.engine.set_expert_capacity(rows)
    return rows


def _count_tokens(trainer: Trainer, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Return how many target tokens, weighted by their masks, and how many tokens the global batch has, and how many
    target tokens each depth of the drafting head, [2 + depths] fp64.

    The result, on the device, is not read by the host, which would have to wait for it.
    """
    data, depths = trainer.mesh.data, trainer.model.mtp_depths
    local_counts = [0.0] * (2 + depths)
    for batch in micro_batches:
        local_counts[0] += batch.labels.numel() if batch.loss_mask is None else float(batch.loss_mask.sum())
        local_counts[1] += batch.tokens.numel() if batch.lengths is None else float(batch.lengths.sum())
        labels, mask = batch.labels, batch.loss_mask
        for depth in range(depths):
            labels, mask = shift_targets(labels, mask, batch.document_bounds)
            local_counts[2 + depth] += float((labels != IGNORED).sum() if mask is None else mask.sum())
    counts = to_device(torch.tensor(local_counts, dtype=torch.float64), trainer.device)
    uneven = ("loss_mask", "lengths", *(["document_bounds"] if depths else []))
    is_even = all(getattr(batch, name) is None for batch in micro_batches for name in uneven)
    return counts * data.size if is_even else data.all_reduce(counts)


class Evaluation(NamedTuple):
    """The outcome of an evaluation, the same on every rank."""

    loss: float
    """Mean per target token; NaN without one."""
    mtp_losses: Mapping[str, float]
    """`LanguageModel.mtp_losses` by name, likewise."""


def evaluate(trainer: Trainer, batches: Iterator[list[MicroBatch]], global_batches: int) -> Evaluation:
    """Return the mean losses over this many global batches."""
    model, data, pipeline = trainer.model, trainer.mesh.data, trainer.mesh.pipeline
    first = model.extra_losses.index(model.mtp_losses[0]) if model.mtp_losses else 0
    sums = torch.zeros(1 + len(model.mtp_losses), dtype=torch.float64, device=trainer.device)
    counts = torch.zeros(2 + model.mtp_depths, dtype=torch.float64, device=trainer.device)
    for _ in range(global_batches):
        micro_batches = next(batches)
        losses, stats = trainer.engine.run_passes(micro_batches, trains=False)
        for loss in losses:
            sums[0] += loss
        sums[1:] += stats.losses[first : first + len(model.mtp_losses)]
        counts += _count_tokens(trainer, micro_batches)
    # Only the last stage has the losses. Each of the drafting head has two sums.
    sums = pipeline.all_reduce(data.all_reduce(sums) * (pipeline.rank == pipeline.size - 1))
    loss, *mtp_losses = (sums / torch.cat([counts[:1], counts[2:].repeat_interleave(2)])).tolist()
    return Evaluation(loss, dict(zip(model.mtp_losses, mtp_losses, strict=True)))
