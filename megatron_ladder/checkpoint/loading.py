"""Loading: weights into a model of any layout, and the newest undamaged checkpoint into a training run.

Each rank reads the runs of parameters that its optimizer updates; nothing is gathered. Kind `weight` is the fp32
master, and a bf16 weight is exactly its rounded value.
"""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.format import Checkpoint, checkpoint_candidates, reporting_os_errors
from megatron_ladder.checkpoint.optimizer_state import OptimizerState
from megatron_ladder.checkpoint.publish import MANIFEST_NAME, is_published_name
from megatron_ladder.checkpoint.saving import generator_states
from megatron_ladder.comm.agreement import raise_on_all_ranks
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.errors import ErrorCollector, UserError, raise_user_errors
from megatron_ladder.parallel.layout import has_padding, parameter_sections, state_sections


class WeightSource(Protocol):
    """Weights on disk by canonical name: a training checkpoint or a Hugging Face directory."""

    def read_weight(self, name: str, box: Box, out: Tensor) -> None:
        """Fill `out` [*box.extent] with a box of a weight; raise UserError if it cannot be read."""


@torch.no_grad()
def load_weights(model: nn.Module, source: WeightSource, recurse: bool = True) -> None:
    """Fill this rank's parameters, reading only the bytes of their slices; padding becomes zero.

    Without `recurse`, those of the module's children are left out.
    """
    for parameter, sections in (*parameter_sections(model, recurse), *state_sections(model, recurse)):
        if has_padding(parameter, sections):
            parameter.zero_()
        for section in sections:
            source.read_weight(section.name, section.box, section.view(parameter))


def load_newest(
    load: Path,
    state: OptimizerState,
    world: CommGroup,
    refuse: Callable[[Checkpoint], list[str]],
    *,
    opened: Checkpoint | None = None,
    optimizer: bool = True,
    generators: bool = True,
    progress: str | None = None,
    fresh: Collection[str] = (),
) -> tuple[Checkpoint, list[str]]:
    """Load the checkpoint that `latest` names, or the newest undamaged one before it; a collective over `world`.

    Each rank verifies its share of the files while it reads the data that it needs. `load` may be one checkpoint, which
    then is the only candidate. `refuse` returns other reasons not to load an undamaged checkpoint; the same on every
    rank. A rank, except rank 0, does not read the manifest of a checkpoint again that it has `opened`. Without
    `optimizer`, moments and the number of steps start from scratch, and without `generators`, random generators.
    `progress` describes the progress bar. Tensors named in `fresh` are not read. Returns the checkpoint, and the errors
    of the candidates tried before it; raises UserError if none can be loaded, and the engine may be partly overwritten.
    """
    candidates = [load]
    errors = list[str]()
    if world.rank == 0 and not ((load / MANIFEST_NAME).is_file() or is_published_name(load.name)):
        names, errors = checkpoint_candidates(load)
        candidates = [load / name for name in names]
    candidates, errors = world.broadcast_object((candidates, errors))
    for directory in candidates:
        try:
            checkpoint = _open_on_all(directory, world, refuse, opened)
            _load_state(checkpoint, state, world, optimizer, generators, progress, fresh)
        except UserError as error:
            errors = [*errors, *error.messages]
        else:
            return checkpoint, errors
    raise UserError(f"{load}: no checkpoint can be loaded", *errors)


def _open_on_all(
    directory: Path, world: CommGroup, refuse: Callable[[Checkpoint], list[str]], opened: Checkpoint | None
) -> Checkpoint:
    """Open a checkpoint; raise UserError on every rank if any rank cannot, for example on a host without the disk.

    Rank 0 looks at all files before the others read the manifest: thousands of ranks would overload a file system.
    `opened` is used instead if it has the same manifest.
    """
    checkpoint = None
    errors = ErrorCollector()
    with errors.collect(), reporting_os_errors(directory):
        if world.rank == 0:
            checkpoint = Checkpoint.open(directory)
            errors.add(*refuse(checkpoint))
    checksum = None if checkpoint is None else checkpoint.manifest_checksum
    messages, checksum = world.broadcast_object((errors.problems, checksum))
    raise_user_errors(messages)
    with errors.collect(), reporting_os_errors(directory):
        if world.rank != 0:
            is_open = opened is not None and (opened.directory, opened.manifest_checksum) == (directory, checksum)
            checkpoint = opened if is_open else Checkpoint.open_unchecked(directory)
            assert checkpoint is not None
            errors.add(*refuse(checkpoint))
    raise_on_all_ranks(world, errors.problems)
    assert checkpoint is not None
    return checkpoint


def _load_state(
    checkpoint: Checkpoint,
    state: OptimizerState,
    world: CommGroup,
    optimizer: bool,
    generators: bool,
    progress: str | None,
    fresh: Collection[str],
) -> None:
    """Read masters, moments, weights and generators; raise UserError on every rank if any rank finds an error."""
    errors = ErrorCollector()
    with ThreadPoolExecutor(1) as thread, closing(checkpoint):
        verified = thread.submit(checkpoint.verify, progress, world.rank, world.size)
        restored: dict[str, Tensor] = {}
        counters = checkpoint.manifest.get("optimizer", {})
        if optimizer and counters.get("steps_taken", -1) < 0:
            errors.add(f"{checkpoint.directory}: {MANIFEST_NAME}: optimizer.steps_taken is missing or negative")
        with errors.collect():
            for span in (*state.spans(), *state.states()):
                for piece in span.pieces(state, moments=optimizer):
                    if piece.name in fresh:
                        continue
                    checkpoint.read(piece.name, piece.kind, piece.box, piece.tensor, piece.shape)
            stored = checkpoint.stored("rng") if generators else {}
            for name, now in generator_states(world.rank).items():
                # A rank that did not exist at the save, or has another kind of generator, keeps its fresh one.
                if name in stored and stored[name].shape == tuple(now.shape):
                    checkpoint.read(name, "rng", Box.whole(now.shape), now)
                    restored[name] = now
        with errors.collect():
            verified.result()
    raise_on_all_ranks(world, errors.problems)
    if optimizer:
        state.set_steps_taken(int(counters["steps_taken"]))
    state.copy_masters_to_weights()
    for name, generator_state in restored.items():
        restore = torch.cuda.set_rng_state if name.endswith(".cuda") else torch.set_rng_state
        restore(generator_state)
