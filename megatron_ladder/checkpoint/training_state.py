"""The state of a training run on disk: saved from any layout, continued in any.

Each rank writes the runs of parameters that its optimizer updates; nothing is gathered. `weight` is the fp32 master,
of which a bf16 weight is exactly the rounded value.
"""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_ladder.checkpoint.engine_state import MOMENTS, EngineState
from megatron_ladder.checkpoint.format import Checkpoint, CheckpointWriter
from megatron_ladder.checkpoint.manifest import merge_manifest
from megatron_ladder.checkpoint.publish import create_temporary_directory, publish, temporary_directory, write_manifest
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.parallel.layout import split_interval


def save_training_state(
    save: Path,
    header: Mapping[str, Any],
    state: EngineState,
    world: CommGroup,
    add_files: Callable[[Path], None],
) -> Path:
    """Writes and publishes a checkpoint; every rank must call it.

    Args:
        header: what the manifest says besides tensors; `iteration` and `model` at least.
        add_files: called on rank 0 with the directory before it is published (the tokenizer's files).

    Returns:
        The published directory, on rank 0; the name before publishing elsewhere.
    """
    state.check_masters()
    token = world.broadcast_object(secrets.token_hex(8))
    iteration = int(header["iteration"])
    if world.rank == 0:
        create_temporary_directory(save, iteration, token)
    world.barrier()
    directory = temporary_directory(save, iteration, token)
    writer = CheckpointWriter(directory, world.rank)
    _add_optimizer(writer, state)
    for name, generator_state in _generator_states(world.rank).items():
        writer.add(name, "rng", tuple(generator_state.shape), (0,), generator_state)
    indices = world.gather_objects(writer.finish())
    published = directory
    if world.rank == 0:
        add_files(directory)
        whole = {**header, "optimizer": {"steps_taken": state.steps_taken(), "loss_scaler": state.loss_scaler()}}
        write_manifest(directory, merge_manifest(whole, indices))
        published = publish(directory, save, iteration)
    world.barrier()
    return published


@torch.no_grad()
def load_training_state(checkpoint: Checkpoint, state: EngineState, world: CommGroup) -> None:
    """Continues from a checkpoint: masters, moments, weights and generators; every rank must call it.

    Raises:
        UserError: a tensor is missing or of another shape.
    """
    for span in state.spans():
        targets = {"weight": span.master} | {which: state.moment(span, which) for which in MOMENTS}
        for part in split_interval(span.sections, span.shape, span.start, span.length):
            box = part.section
            for kind, target in targets.items():
                out = target.narrow(0, part.begin, part.length)
                checkpoint.read_span(box.name, kind, box.global_shape, box.offset, box.extent, part.start, out)
    optimizer = checkpoint.manifest["optimizer"]
    state.set_steps_taken(int(optimizer["steps_taken"]))
    state.set_loss_scaler(optimizer.get("loss_scaler", {}))
    state.masters_changed()
    _restore_generators(checkpoint, world.rank)


def _add_optimizer(writer: CheckpointWriter, state: EngineState) -> None:
    for span in state.spans():
        if not span.owned:
            continue
        values = {"weight": span.master} | {which: state.moment(span, which) for which in MOMENTS}
        for part in split_interval(span.sections, span.shape, span.start, span.length):
            box = part.section
            if box.counted:
                for kind, value in values.items():
                    flat = value.narrow(0, part.begin, part.length)
                    writer.add_span(box.name, kind, box.global_shape, box.offset, box.extent, part.start, flat)


def _generator_states(rank: int) -> dict[str, torch.Tensor]:
    """States of torch's generators. Nothing here draws from them in a step; a user's own model may."""
    states = {f"rng.rank_{rank:05d}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.rank_{rank:05d}.cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_generators(checkpoint: Checkpoint, rank: int) -> None:
    """A rank that did not exist when the checkpoint was written keeps its fresh generators."""
    stored = checkpoint.tensors("rng")
    for name, now in _generator_states(rank).items():
        if name in stored and stored[name].global_shape == tuple(now.shape):
            checkpoint.read(name, "rng", (0,), tuple(now.shape), out=now)
            if name.endswith(".cuda"):
                torch.cuda.set_rng_state(now)
            else:
                torch.set_rng_state(now)
