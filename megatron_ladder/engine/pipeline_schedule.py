"""One global batch through the stages, by DeepSpeed's schedules: 1F1B for training, one pass for evaluation.

DeepSpeed's `train_batch` would end with the optimizer's step, clipping by a norm of its own. Here its instructions run
up to the reduced gradients, the caller computes the norm and clips as in every other layout, and then asks for the
step.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MicroBatch = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Token ids and labels [b, s]; a loss mask, positions and the bounds of documents, or None, as `LanguageModel.forward`
takes them. A stage in the middle uses the last two alone."""


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
    # Every stage computes with something of each micro-batch, but DeepSpeed loads one on the first and the last alone.
    engine.module.stage.coming = deque(micro_batches)
    engine.set_dataiterator((tokens, ()) for tokens, *_ in micro_batches)
    engine.total_loss, engine._compute_loss = None, True
    engine._exec_schedule(schedule)
    return torch.zeros((), device=engine.device) if engine.total_loss is None else engine.total_loss


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
