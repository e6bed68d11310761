"""The state of a training run on disk: saved from any layout, continued in any.

Each rank writes the runs of parameters that its optimizer updates; nothing is gathered. `weight` is the fp32 master,
of which a bf16 weight is exactly the rounded value.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megatron_ladder.checkpoint.format import Checkpoint, Progress
from megatron_ladder.checkpoint.optimizer_state import MOMENTS, OptimizerState
from megatron_ladder.checkpoint.saving import SaveError, SaveOptions, TrainingSave, generator_states
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.errors import UserError
from megatron_ladder.parallel.layout import split_interval


def save_training_state(
    save: Path,
    header: Mapping[str, Any],
    state: OptimizerState,
    world: CommGroup,
    add_files: Callable[[Path], None],
    options: SaveOptions | None = None,
) -> Path:
    """Writes and publishes a checkpoint; every rank must call it.

    Args:
        header: what the manifest says besides tensors; `iteration` and `model` at least.
        add_files: called on rank 0 with the directory before it is published (the tokenizer's files).

    Returns:
        The published directory.

    Raises:
        SaveError: there is no room, or a file could not be written; nothing is left of the save.
    """
    saving = TrainingSave.begin(save, header, state, world, add_files, options or SaveOptions())
    outcome = world.broadcast_object(saving.write(world.gather_objects))
    if outcome.error is not None:
        raise SaveError(outcome.error)
    return Path(outcome.directory)


def load_training_state(
    checkpoint: Checkpoint,
    state: OptimizerState,
    world: CommGroup,
    *,
    optimizer: bool = True,
    generators: bool = True,
    verify: bool = False,
    progress: Progress | None = None,
) -> None:
    """Continues from a checkpoint: masters, moments, weights and generators; every rank must call it.

    Args:
        optimizer: whether moments and the number of steps are read; without them the optimizer begins anew.
        generators: whether the states of random generators are read.
        verify: whether checksums are compared, while reading; ranks share the files.
        progress: of verifying this rank's share.

    Raises:
        UserError: on every rank alike: a tensor is missing or of another shape, or a file is damaged. What was read
            by then lies in the engine: load another checkpoint, or end.
    """
    with ThreadPoolExecutor(1) as aside:
        verified = aside.submit(checkpoint.verify, progress, world.rank, world.size) if verify else None
        mistakes: list[str] = []
        read_generators: dict[str, torch.Tensor] = {}
        try:
            _read_optimizer(checkpoint, state, optimizer)
            # Kept until all ranks are known to have read well.
            if generators:
                read_generators = _read_generators(checkpoint, world.rank)
        except UserError as error:
            mistakes += error.mistakes
        try:
            if verified is not None:
                verified.result()
        except UserError as error:
            mistakes += error.mistakes
    # A damaged file may be met by every rank that reads it.
    everywhere = list(dict.fromkeys(line for lines in world.gather_objects(mistakes) for line in lines))
    everywhere = world.broadcast_object(everywhere)
    if everywhere:
        raise UserError(*everywhere)
    if optimizer:
        stored = checkpoint.manifest["optimizer"]
        state.set_steps_taken(int(stored["steps_taken"]))
        state.set_loss_scaler(stored.get("loss_scaler", {}))
    state.copy_masters_to_weights()
    for name, generator_state in read_generators.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(generator_state)
        else:
            torch.set_rng_state(generator_state)


@torch.no_grad()
def _read_optimizer(checkpoint: Checkpoint, state: OptimizerState, moments: bool) -> None:
    for span in state.spans():
        targets = {"weight": span.master}
        if moments:
            targets |= {which: state.moment(span, which) for which in MOMENTS}
        for part in split_interval(span.sections, span.shape, span.start, span.length):
            box = part.section
            for kind, target in targets.items():
                out = target.narrow(0, part.begin, part.length)
                checkpoint.read_span(box.name, kind, box.global_shape, box.offset, box.extent, part.start, out)


def _read_generators(checkpoint: Checkpoint, rank: int) -> dict[str, torch.Tensor]:
    """A rank that did not exist when the checkpoint was written keeps its fresh generators."""
    stored, found = checkpoint.tensors("rng"), generator_states(rank)
    found = {n: now for n, now in found.items() if n in stored and stored[n].global_shape == tuple(now.shape)}
    for name, now in found.items():
        checkpoint.read(name, "rng", (0,), tuple(now.shape), out=now)
    return found
