"""One global batch through the stages, by DeepSpeed's schedules: 1F1B for training, one pass for evaluation.

DeepSpeed's `train_batch` would end with the optimizer's step, clipping by a norm of its own. Here its instructions run
up to the reduced gradients, the caller computes the norm and clips as in every other layout, and then asks for the
step.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MicroBatch = tuple[Tensor, Tensor, Tensor | None]
"""Token ids, labels, and a loss mask or None, [b, s] each."""


def forward_backward(engine: Any, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
    """Forward and backward of every micro-batch through all stages; gradients are reduced when it returns.

    Args:
        engine: what `build_pipeline_engine` made.
        micro_batches: this data-parallel rank's, as many as the engine's accumulation steps.
        scale: what the loss is multiplied by before backward.

    Returns:
        The scaled loss, summed over micro-batches, on the last stage; zero on the others.
    """
    stage, count = engine.module.stage, engine.micro_batches
    assert len(micro_batches) == count
    # The engine divides what goes backward by the number of micro-batches.
    stage.loss_scale = scale * count
    stage.model.stack.partial_sums.expect(count)
    return _run(engine, _WithoutStep(engine._train_schedule()), micro_batches) / count


@torch.no_grad()
def evaluate_batch(engine: Any, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """The loss summed over all target tokens of the micro-batches on the last stage; zero on the others."""
    engine.module.stage.loss_scale = 1.0
    return _run(engine, engine._inference_schedule(len(micro_batches)), micro_batches)


def take_step(engine: Any) -> None:
    """The optimizer's step with the gradients that are there, and zeroes them."""
    engine._exec_optimizer_step()


def _run(engine: Any, schedule: Any, micro_batches: Sequence[MicroBatch]) -> Tensor:
    engine.set_dataiterator(_as_deepspeed_reads(engine, micro_batches))
    engine.total_loss, engine._compute_loss = None, True
    engine._exec_schedule(schedule)
    return torch.zeros((), device=engine.device) if engine.total_loss is None else engine.total_loss


def _as_deepspeed_reads(engine: Any, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, tuple[()]]]:
    """What enters the first stage. The schedules load a micro-batch just before its forward pass, so that the targets
    put down here are those of the pass that follows."""
    for tokens, labels, loss_mask in micro_batches:
        mask = None if loss_mask is None else loss_mask.to(engine.device)
        engine.module.stage.targets = labels.to(engine.device), mask
        yield tokens, ()


class _WithoutStep:
    """A training schedule less its last instruction."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def num_pipe_buffers(self) -> int:
        """Micro-batches in flight."""
        buffers: int = self._schedule.num_pipe_buffers()
        return buffers

    def __iter__(self) -> Iterator[list[Any]]:
        from deepspeed.runtime.pipe.schedule import OptimizerStep

        for instructions in self._schedule:
            yield [instruction for instruction in instructions if not isinstance(instruction, OptimizerStep)]
