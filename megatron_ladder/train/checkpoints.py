"""How a run's checkpoints are written and found again; all ranks take part in each."""

from pathlib import Path

import torch

from megatron_ladder import __version__
from megatron_ladder.checkpoint.format import Checkpoint, find_checkpoint
from megatron_ladder.checkpoint.training_state import load_training_state, save_training_state
from megatron_ladder.data.tokenizers import copy_tokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.train.inputs import RunInputs, describe_data
from megatron_ladder.train.log import say
from megatron_ladder.train.setup import Trainer


def resume(trainer: Trainer, inputs: RunInputs) -> tuple[int, int]:
    """Loads the checkpoint, if there is one; returns steps done and samples seen."""
    load, rank = trainer.run.checkpoint.load, trainer.mesh.world.rank
    if load is None:
        return 0, 0
    if inputs.checkpoint is None:
        say(f"*** --load {load} holds no checkpoint: the run starts anew ***", rank)
        return 0, 0
    checkpoint = agree_on_checkpoint(load, trainer)
    load_training_state(checkpoint, trainer.state, trainer.mesh.world)
    say(f"continues from {checkpoint.directory}: {checkpoint.iteration} steps done", rank)
    return checkpoint.iteration, checkpoint.consumed_samples


def agree_on_checkpoint(load: Path, trainer: Trainer) -> Checkpoint:
    """The newest whole checkpoint, its checksums verified by the first rank for all."""
    world = trainer.mesh.world
    directory = None
    if world.rank == 0:
        found = find_checkpoint(load, verify=True)
        assert found is not None
        for warning in found.warnings:
            print(f"*** {warning} ***", flush=True)
        directory = str(found.directory)
    return Checkpoint.open(Path(world.broadcast_object(directory)))


def save(trainer: Trainer, inputs: RunInputs, iteration: int, consumed_samples: int) -> None:
    """Publishes a checkpoint in --save, if that was given; all ranks take part."""
    run, tokenizer = trainer.run, inputs.tokenizer
    if run.checkpoint.save is None:
        return
    header = {
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        "model": run.model.to_dict(),
        "run": run.to_dict(),
        "data": describe_data(inputs.sources, tokenizer),
        "tokenizer": None if tokenizer is None else {"type": tokenizer.kind, "sha256": tokenizer.sha256},
        "versions": {"megatron_ladder": __version__, "torch": torch.__version__},
    }

    def add_tokenizer(directory: Path) -> None:
        if tokenizer is not None:
            copy_tokenizer(tokenizer, directory)

    try:
        published = save_training_state(
            run.checkpoint.save, header, trainer.state, trainer.mesh.world, add_tokenizer
        )
    except OSError as error:
        raise UserError(f"--save {run.checkpoint.save}: {error.strerror or error}") from error
    say(f"saved {published}", trainer.mesh.world.rank)
