"""The whole training state of a rank, and handing it to another trainer."""

from pathlib import Path

import torch
from torch import Tensor

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.optimizer_state import MOMENTS
from megatron_ladder.train.step import train_step
from tests.helpers.steps import steps_of_batches
from tests.helpers.training import (
    build_trainer_here,
    load_trainer,
    own_batches,
    save_trainer,
)


def pass_on(argv: list[str], load: str | None, save: str, steps: int) -> int:
    """On each rank: loads a checkpoint, takes steps, and saves; returns the steps that AdamW then knows of."""
    # Another seed: nothing of the trainer's own weights may be left after loading.
    trainer = build_trainer_here(argv if load is None else [*argv, "--seed", "99"])
    if load is not None:
        load_trainer(trainer, Path(load))
    training = trainer.run.training
    batches = steps_of_batches(steps, 4, training.micro_batch_size, training.seq_length)
    for iteration, batch in enumerate(batches, start=1):
        train_step(trainer, own_batches(trainer, batch), iteration)
    save_trainer(trainer, Path(save), 1)
    return trainer.engine.state.steps_taken()


def everything(save: Path) -> dict[tuple[str, str], Tensor]:
    """All weights and moments of the checkpoint in a folder, whole."""
    checkpoint = Checkpoint.open(save)
    values = {}
    for kind in ("weight", *MOMENTS):
        for name, stored in checkpoint.stored(kind).items():
            shape = stored.shape
            values[name, kind] = torch.empty(shape)
            checkpoint.read(name, kind, (0,) * len(shape), shape, out=values[name, kind])
    return values
