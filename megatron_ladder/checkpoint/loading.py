"""Which checkpoint a run goes on from: the newest that is whole, which only reading all of it tells."""

from collections.abc import Callable
from pathlib import Path

from megatron_ladder.checkpoint.format import Checkpoint, Progress, checkpoint_candidates
from megatron_ladder.checkpoint.optimizer_state import OptimizerState
from megatron_ladder.checkpoint.publish import MANIFEST_NAME, is_published_name
from megatron_ladder.checkpoint.training_state import load_training_state
from megatron_ladder.comm.agreement import name_ranks
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.errors import UserError


def load_newest(
    load: Path,
    state: OptimizerState,
    world: CommGroup,
    refuse: Callable[[Checkpoint], list[str]],
    *,
    optimizer: bool = True,
    generators: bool = True,
    progress: Progress | None = None,
) -> tuple[Checkpoint, list[str]]:
    """Loads the checkpoint that `latest` names, or the newest one before it whose every file is as it was written.

    All ranks call it; each verifies its share of the files while it reads what it needs.

    Args:
        load: a directory of checkpoints, or one checkpoint, which then is the only one tried.
        refuse: what else speaks against a checkpoint that is whole; every rank must find the same.
        optimizer, generators: as for `load_training_state`.
        progress: of verifying this rank's share.

    Returns:
        The checkpoint, and a line for everything that was wrong with those tried before it.

    Raises:
        UserError: none can be loaded; each is named, and why.
    """
    candidates, faults = _candidates(load) if world.rank == 0 else ([], [])
    while True:
        directory = world.broadcast_object(_next_whole(candidates, faults) if world.rank == 0 else None)
        faults = world.broadcast_object(faults)
        if directory is None:
            raise UserError(f"{load}: there is no checkpoint that can be loaded", *faults)
        try:
            checkpoint = _open_alike(Path(directory), world, refuse)
            load_training_state(
                checkpoint, state, world, optimizer=optimizer, generators=generators, verify=True, progress=progress
            )
        except UserError as error:
            faults = [*faults, *error.mistakes]
            continue
        return checkpoint, faults


def _candidates(load: Path) -> tuple[list[Path], list[str]]:
    if (load / MANIFEST_NAME).is_file() or is_published_name(load.name):
        return [load], []
    names, faults = checkpoint_candidates(load)
    return [load / name for name in names], faults


def _next_whole(candidates: list[Path], faults: list[str]) -> str | None:
    """Takes the next candidate that can be opened, noting what is wrong with those before it."""
    while candidates:
        directory = candidates.pop(0)
        try:
            _open(directory)
        except UserError as error:
            faults += error.mistakes
        else:
            return str(directory)
    return None


def _open_alike(directory: Path, world: CommGroup, refuse: Callable[[Checkpoint], list[str]]) -> Checkpoint:
    """Raises UserError on every rank if any of them cannot open it, as on a host that does not see the directory."""
    checkpoint, mistakes = None, list[str]()
    try:
        checkpoint = _open(directory)
        mistakes += refuse(checkpoint)
    except UserError as error:
        mistakes += error.mistakes
    told: dict[str, list[int]] = {}
    for rank, lines in enumerate(world.gather_objects(mistakes)):
        for line in lines:
            told.setdefault(line, []).append(rank)
    everywhere = [
        line if len(ranks) == world.size else f"{line} (as {name_ranks(ranks)} found)" for line, ranks in told.items()
    ]
    everywhere = world.broadcast_object(everywhere)
    if everywhere or checkpoint is None:
        raise UserError(*everywhere)
    return checkpoint


def _open(directory: Path) -> Checkpoint:
    try:
        return Checkpoint.open(directory)
    except OSError as error:
        raise UserError(f"{error.filename or directory}: cannot be read: {error.strerror or error}") from None
