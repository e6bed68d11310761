"""One save of a training run's state, in two parts: the first needs all ranks and the state, `write` needs neither.

    begin   every rank records what it will write, or copies it to host memory; rank 0 checks for room and creates a
            directory. Collectives run here.
    write   every rank writes its files; rank 0 gathers the indices of all ranks and publishes. The caller chooses how
            they are gathered: by a collective, or through files when this runs alongside training.

A save that fails removes what it wrote, leaves all earlier checkpoints unchanged, and reports one reason.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.async_save import HostMemory
from megatron_ladder.checkpoint.checksum import file_checksum
from megatron_ladder.checkpoint.manifest import (
    BoxRecord,
    FileRecord,
    Index,
    Tiling,
    file_name,
    make_index,
    merge_manifest,
)
from megatron_ladder.checkpoint.optimizer_state import OptimizerState
from megatron_ladder.checkpoint.publish import (
    Retention,
    create_temporary_directory,
    publish,
    remove_old_checkpoints,
    temporary_directory,
    write_manifest,
)
from megatron_ladder.checkpoint.tensor_file import box_key, element_name, write_tensor_file
from megatron_ladder.comm.group import CommGroup

_OTHER_BYTES = 1 << 20
"""Room that a save needs besides its tensors: manifest, headers, tokenizer, overhead of the file system."""

Gather = Callable[[bytes], list[bytes]]
"""Receives the bytes of a rank, and returns those of all ranks on rank 0."""


class SaveError(Exception):
    """A checkpoint could not be written; earlier ones are unchanged."""


class _CheckpointWriter:
    """Writes the boxes that one rank holds.

    `add` only records the tensors, which must not change until `finish` has written them: a save holds
    no second copy of the state.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        """`directory` exists, and is not yet published."""
        self._directory = directory
        self._rank = rank
        self._tensors: dict[str, list[tuple[str, Tensor]]] = {}
        self._boxes: dict[tuple[str, str], tuple[str, tuple[int, ...], list[BoxRecord]]] = {}

    def add(self, name: str, kind: str, global_shape: Sequence[int], offset: Sequence[int], tensor: Tensor) -> None:
        """Record the elements of a box of a canonical tensor of `global_shape`, contiguous and on any device."""
        box = Box(tuple(offset), tuple(tensor.shape))
        assert box.fits(global_shape) and tensor.is_contiguous(), f"{name}: not a box of shape {list(global_shape)}"
        new = (element_name(tensor.dtype), tuple(global_shape), list[BoxRecord]())
        self._boxes.setdefault((kind, name), new)[2].append(BoxRecord(box.offset, box.extent, self._rank))
        self._tensors.setdefault(file_name(kind, self._rank), []).append((box_key(kind, name, box), tensor))

    def first_not_finite(self) -> str | None:
        """Return the kind and name of the first recorded tensor with an infinity or a NaN."""
        tensors = (item for items in self._tensors.values() for item in items)
        for key, tensor in tensors:
            # One pass without a copy; a NaN is both the smallest and the largest element.
            if tensor.is_floating_point() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
                kind, _, name = key.rpartition("@")[0].partition(":")
                return f"{kind} of {name}"
        return None

    def finish(self) -> Index:
        """Write and fsync the files, and return their index; raise FileExistsError if this rank wrote here before."""
        files = [
            FileRecord(name, *write_tensor_file(self._directory / name, tensors))
            for name, tensors in self._tensors.items()
        ]
        tensors = {key: (dtype, Tiling(shape, tuple(boxes))) for key, (dtype, shape, boxes) in self._boxes.items()}
        return make_index(files, tensors)

    def discard(self) -> None:
        """Remove the written files."""
        for name in self._tensors:
            (self._directory / name).unlink(missing_ok=True)


class SaveOutcome(NamedTuple):
    """The result of a save, on rank 0: the published directory (empty if it failed), and why it failed.

    `removed` are the older checkpoints that were removed. `bad_numbers` means that the state is not finite, so that no
    later save can succeed either.
    """

    directory: str
    error: str | None
    removed: tuple[str, ...] = ()
    bad_numbers: bool = False


class _Part(Struct):
    """What a rank wrote, or why it wrote nothing."""

    index: Index | None = None
    error: str | None = None
    """The files cannot be written."""
    not_finite: str | None = None
    """The state has an infinity or a NaN."""


class TrainingSave:
    """A save that has begun; `write` ends it."""

    def __init__(
        self,
        save: Path,
        header: Mapping[str, Any],
        state: OptimizerState,
        world: CommGroup,
        add_files: Callable[[Path], None],
        retention: Retention | None = None,
        host: HostMemory | None = None,
    ) -> None:
        """Record the state, or copy it to `host`, and make room for it; a collective over `world`.

        Without `host` the state must not change until `write` has returned. The header has the keys of the manifest
        besides tensors. On rank 0, `add_files` receives the directory before it is published, to add the tokenizer's
        files. Raises SaveError on every rank if there is no room, or no directory can be created.
        """
        spans = [span for span in (*state.spans(), *state.states()) if span.owned]
        rows = [{"weight": span.master, **{w: state.moment(span, w) for w in span.moments}} for span in spans]
        self.iteration = int(header["iteration"])
        self._save, self._add_files, self._retention = save, add_files, retention or Retention()
        sizes = world.gather_objects(sum(value.nbytes for row in rows for value in row.values()))
        room = (*_make_room(save, self.iteration, sum(sizes)), sum(sizes)) if world.rank == 0 else None
        token, error, self.total_bytes = world.broadcast_object(room)
        if error is not None:
            raise SaveError(error)
        self.directory = temporary_directory(save, self.iteration, token)
        self._writer = _CheckpointWriter(self.directory, world.rank)
        if host is not None:
            copies = iter(host.copies([value for row in rows for value in row.values()]))
            rows = [{kind: next(copies) for kind in row} for row in rows]
        for span, row in zip(spans, rows, strict=True):
            for section, box, begin in span.boxes():
                for kind in row if section.counted else ():
                    piece = row[kind].narrow(0, begin, box.numel).view(box.extent)
                    self._writer.add(section.name, kind, section.tensor.shape, box.offset, piece)
        for name, generator_state in generator_states(world.rank).items():
            self._writer.add(name, "rng", generator_state.shape, (0,), generator_state)
        self._header = {**header, "optimizer": {"steps_taken": state.steps_taken()}}

    def write(self, gather: Gather) -> SaveOutcome | None:
        """Write this rank's files; on rank 0 wait for the other ranks and publish. Returns None on other ranks."""
        try:
            gathered = gather(msgspec.json.encode(self._write_own()))
        except OSError as error:
            return self._give_up(str(error) if isinstance(error, TimeoutError) else _reason(error, self.directory))
        if not gathered:
            return None
        parts = [msgspec.json.decode(part, type=_Part) for part in gathered]
        if bad := [part.not_finite for part in parts if part.not_finite]:
            return self._give_up(f"{bad[0]} is not finite")._replace(bad_numbers=True)
        if errors := dict.fromkeys(part.error for part in parts if part.error):
            return self._give_up("; ".join(errors))
        indices = [part.index for part in parts if part.index is not None]
        try:
            self._add_files(self.directory)
            indices.append(make_index(self._other_files({file.name for index in indices for file in index.files}), {}))
            write_manifest(self.directory, merge_manifest(self._header, indices))
            published = publish(self.directory, self._save, self.iteration)
        except OSError as error:
            return self._give_up(_reason(error, self.directory))
        return SaveOutcome(str(published), None, remove_old_checkpoints(self._save, self._retention))

    def _write_own(self) -> _Part:
        if (bad := self._writer.first_not_finite()) is not None:
            return _Part(not_finite=bad)
        try:
            return _Part(self._writer.finish())
        except OSError as error:
            # Frees room on a full disk, so that the hand-over file can be written.
            self._writer.discard()
            return _Part(error=_reason(error, self.directory))

    def _other_files(self, written: set[str]) -> list[FileRecord]:
        """Fsync the files that no rank's writer wrote, such as the tokenizer's, and return their records."""
        records = []
        for path in sorted(path for path in self.directory.iterdir() if path.name not in written):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            records.append(FileRecord(path.name, path.stat().st_size, file_checksum(path)))
        return records

    def _give_up(self, why: str) -> SaveOutcome:
        shutil.rmtree(self.directory, ignore_errors=True)
        return SaveOutcome("", why)


def _make_room(save: Path, iteration: int, total_bytes: int) -> tuple[str, str | None]:
    """Create the directory of a save if the file system has room; return its token, and why there is no directory."""
    token, needed = secrets.token_hex(8), total_bytes + _OTHER_BYTES
    try:
        directory = create_temporary_directory(save, iteration, token)
        found = os.statvfs(save)
        free = found.f_bavail * found.f_frsize
        # Some network file systems do not report their size.
        if found.f_blocks and free < needed:
            directory.rmdir()
            return token, f"a checkpoint needs {_size(needed)}, and {_size(free)} are free in {save}"
    except OSError as error:
        return token, _reason(error, save)
    return token, None


def generator_states(rank: int) -> dict[str, Tensor]:
    """Return the states of torch's generators. Training steps do not draw from them; a user's own model may."""
    states = {f"rng.rank_{rank:05d}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.rank_{rank:05d}.cuda"] = torch.cuda.get_rng_state()
    return states


def _reason(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {error.strerror or error}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
