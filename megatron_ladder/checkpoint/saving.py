"""One save of a training run's state, in two parts: `begin` needs all ranks and the state, `write` needs neither.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ladder.checkpoint.async_save import HostMemory
from megatron_ladder.checkpoint.boxes import Box, cut_span
from megatron_ladder.checkpoint.checksum import DEFAULT_CHECKSUM, file_checksum
from megatron_ladder.checkpoint.manifest import merge_manifest
from megatron_ladder.checkpoint.optimizer_state import OptimizerState, Span
from megatron_ladder.checkpoint.publish import create_temporary_directory, publish, temporary_directory, write_manifest
from megatron_ladder.checkpoint.retention import Retention, remove_old_checkpoints
from megatron_ladder.checkpoint.tensor_file import BY_NAME, element_name, write_tensor_file
from megatron_ladder.checkpoint.tilings import KINDS, BoxRecord, FileIndex, FileRecord, make_index
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.parallel.layout import split_interval

_OTHER_BYTES = 1 << 20
"""Room that a save needs besides its tensors: manifest, headers, tokenizer, overhead of the file system."""

Gather = Callable[[Any], list[Any]]
"""Receives the JSON value of a rank, and returns those of all ranks on rank 0."""
_MasterPair = tuple[str, Tensor, Tensor]
"""The name of a weight, its master, and the weight that the model computes with, to which the master must round."""


class SaveError(Exception):
    """A checkpoint could not be written; earlier ones are unchanged."""


class CheckpointWriter:
    """Writes the boxes that one rank holds.

    `add` and `add_span` only record the tensors, which must not change until `finish` has written them: a save holds
    no second copy of the state.
    """

    def __init__(self, directory: Path, rank: int, algorithm: str = DEFAULT_CHECKSUM) -> None:
        """`directory` exists, and is not yet published; `algorithm` is that of the checksums."""
        self._directory = directory
        self._rank = rank
        self._algorithm = algorithm
        self._tensors: dict[str, list[tuple[str, Tensor]]] = {}
        self._boxes: list[BoxRecord] = []

    def add(self, name: str, kind: str, global_shape: Sequence[int], offset: Sequence[int], tensor: Tensor) -> None:
        """Record one box of a canonical tensor.

        Args:
            kind: one of `KINDS`.
            global_shape: shape of the canonical tensor; one to eight dimensions.
            offset: offset of the box in the canonical tensor.
            tensor: the elements of the box; its shape is the extent. Contiguous, on any device.

        Raises:
            ValueError: the box is not inside the tensor, or its kind, dtype or memory layout is not supported.
        """
        box, dtype = Box(tuple(offset), tuple(tensor.shape)), element_name(tensor.dtype)
        if kind not in KINDS or dtype not in BY_NAME:
            raise ValueError(f"{name}: kind {kind!r} or dtype {tensor.dtype} cannot be stored in a checkpoint")
        if not box.fits(global_shape) or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {list(tensor.shape)} elements at {list(offset)} are not contiguous, or not a box of a tensor "
                f"of shape {list(global_shape)}"
            )
        record = BoxRecord(name, kind, tuple(global_shape), box, dtype, self._rank)
        self._tensors.setdefault(record.file, []).append((record.key, tensor))
        self._boxes.append(record)

    def add_span(
        self, name: str, kind: str, global_shape: Sequence[int], held: Box, start: int, flat_tensor: Tensor
    ) -> None:
        """Record an interval of a flattened box; raise ValueError as `add`, or if it is not inside the box.

        Args:
            held: the box of the canonical tensor (a rank's slice).
            start: first element of the interval in the flattened box.
            flat_tensor: [elements of the interval], contiguous.
        """
        for box, begin in cut_span(held, start, flat_tensor.numel()):
            piece = flat_tensor[begin : begin + box.numel].view(box.extent)
            self.add(name, kind, global_shape, box.offset, piece)

    def first_not_finite(self) -> str | None:
        """Return the kind and name of the first recorded tensor with an infinity or a NaN."""
        tensors = (item for items in self._tensors.values() for item in items)
        for key, tensor in tensors:
            # One pass without a copy; a NaN is both the smallest and the largest element.
            if tensor.is_floating_point() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
                kind, _, name = key.rpartition("@")[0].partition(":")
                return f"{kind} of {name}"
        return None

    def finish(self) -> FileIndex:
        """Write and fsync the files, and return their index; raise FileExistsError if this rank wrote here before."""
        files: list[FileRecord] = []
        for name, tensors in self._tensors.items():
            size, checksum = write_tensor_file(self._directory / name, tensors, self._algorithm)
            files.append({"name": name, "size": size, "checksum": checksum})
        return make_index(files, self._boxes)

    def discard(self) -> None:
        """Remove the written files."""
        for name in self._tensors:
            (self._directory / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save.

    The state is copied to `host`, so that training may continue while it is written; None writes it in place.
    """

    checksum: str = DEFAULT_CHECKSUM
    retention: Retention = Retention()
    host: HostMemory | None = None


class SaveOutcome(NamedTuple):
    """The result of a save, on rank 0: the published directory (empty if it failed), and why it failed.

    `removed` are the older checkpoints that were removed. `notes` has one line for each thing that could not be
    removed, which is harmless except for the disk space. `bad_numbers` means that the state is not finite, so that no
    later save can succeed either.
    """

    directory: str
    error: str | None
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    bad_numbers: bool = False


@dataclass(frozen=True)
class TrainingSave:
    """A save that has begun; `write` ends it.

    `directory` is the temporary one; `total_bytes` is the size of the state of all ranks.
    """

    directory: Path
    iteration: int
    total_bytes: int
    _save: Path
    _header: Mapping[str, Any]
    _writer: CheckpointWriter
    _pairs: Sequence[_MasterPair]
    _add_files: Callable[[Path], None]
    _options: SaveOptions
    _notes: tuple[str, ...]

    @staticmethod
    def begin(
        save: Path,
        header: Mapping[str, Any],
        state: OptimizerState,
        world: CommGroup,
        add_files: Callable[[Path], None],
        options: SaveOptions,
    ) -> "TrainingSave":
        """Record or copy the state, and make room for it; a collective over `world`.

        Without `options.host` the state must not change until `write` has returned.

        Args:
            save: the directory of the run's checkpoints.
            header: keys of the manifest besides tensors; see `manifest`.
            add_files: receives, on rank 0, the directory before it is published, to add the tokenizer's files.

        Raises:
            SaveError: on every rank: there is no room, or no directory can be created.
        """
        spans = [span for span in state.spans() if span.owned]
        values = [[span.master, *(state.moment(span, which) for which in span.moments)] for span in spans]
        own_bytes = sum(value.nbytes for row in values for value in row)
        iteration = int(header["iteration"])
        sizes = world.gather_objects(own_bytes)
        room = world.broadcast_object(_make_room(save, iteration, sum(sizes)) if world.rank == 0 else None)
        if isinstance(room, str):
            raise SaveError(room)
        token, total_bytes, notes = room
        directory = temporary_directory(save, iteration, token)
        writer = CheckpointWriter(directory, world.rank, options.checksum)
        pairs = _record_state(writer, spans, values, options.host)
        for name, generator_state in generator_states(world.rank).items():
            writer.add(name, "rng", tuple(generator_state.shape), (0,), generator_state)
        whole = {**header, "optimizer": {"steps_taken": state.steps_taken()}}
        return TrainingSave(directory, iteration, total_bytes, save, whole, writer, pairs, add_files, options, notes)

    def write(self, gather: Gather) -> SaveOutcome | None:
        """Write this rank's files; on rank 0 wait for the other ranks and publish. Returns None on other ranks.

        Raises:
            RuntimeError: on rank 0: on some rank, a finite master does not round to its weight.
        """
        try:
            parts = gather(self._write_own())
        except TimeoutError as error:
            return self._give_up(str(error))
        except OSError as error:
            return self._give_up(_reason(error, self.directory))
        if not parts:
            return None
        if faults := [part["fault"] for part in parts if "fault" in part]:
            self._give_up("")
            raise RuntimeError(faults[0])
        if bad := [part["bad"] for part in parts if "bad" in part]:
            return self._give_up(f"{bad[0]} is not finite")._replace(bad_numbers=True)
        if errors := dict.fromkeys(part["error"] for part in parts if "error" in part):
            return self._give_up("; ".join(errors))
        indices, algorithm = [part["index"] for part in parts], self._options.checksum
        try:
            self._add_files(self.directory)
            written = {record["name"] for index in indices for record in index["files"]}
            indices.append(make_index(_other_files(self.directory, written, algorithm), []))
            write_manifest(self.directory, merge_manifest(self._header, indices), algorithm)
            published = publish(self.directory, self._save, self.iteration)
        except OSError as error:
            return self._give_up(_reason(error, self.directory))
        removed: tuple[str, ...] = ()
        try:
            removed, notes = remove_old_checkpoints(self._save, self._options.retention)
        except OSError as error:
            notes = (f"old checkpoints are not removed: {_reason(error, self._save)}",)
        return SaveOutcome(str(published), None, removed, self._notes + notes)

    def _write_own(self) -> dict[str, Any]:
        """Write this rank's files, and return their index or why there is none."""
        if (bad := self._writer.first_not_finite()) is not None:
            return {"bad": bad}
        for name, master, weight in self._pairs:
            bits = torch.int16 if weight.element_size() == 2 else torch.int32
            if not torch.equal(master.to(weight.device, weight.dtype).view(bits), weight.view(bits)):
                return {"fault": f"the fp32 master of {name} does not round to the model's weight"}
        try:
            return {"index": self._writer.finish()}
        except OSError as error:
            # Frees room on a full disk, so that the hand-over file can be written.
            self._writer.discard()
            return {"error": _reason(error, self.directory)}

    def _give_up(self, why: str) -> SaveOutcome:
        shutil.rmtree(self.directory, ignore_errors=True)
        return SaveOutcome("", why, (), self._notes)


def _make_room(save: Path, iteration: int, total_bytes: int) -> tuple[str, int, tuple[str, ...]] | str:
    """Create the directory of a save if the file system has room for the files of all ranks.

    Returns:
        The token of the directory, `total_bytes`, and notes for the user; or why there is no directory.
    """
    token = secrets.token_hex(8)
    needed = total_bytes + _OTHER_BYTES
    notes: list[str] = []
    try:
        directory = create_temporary_directory(save, iteration, token, notes.append)
        found = os.statvfs(save)
        free = found.f_bavail * found.f_frsize
        # Some network file systems do not report their size.
        if found.f_blocks and free < needed:
            directory.rmdir()
            return f"a checkpoint needs {_size(needed)}, and {_size(free)} are free in {save}"
    except OSError as error:
        return _reason(error, save)
    return token, total_bytes, tuple(notes)


def _record_state(
    writer: CheckpointWriter, spans: Sequence[Span], values: Sequence[Sequence[Tensor]], host: HostMemory | None
) -> list[_MasterPair]:
    """Add every span to the writer; return the pairs to compare before they are written."""
    # In fp32 without ZeRO, weight and master are one tensor.
    compared = [span for span in spans if span.weight.data_ptr() != span.master.data_ptr()]
    flat = [value for row in values for value in row]
    weights = [span.weight for span in compared]
    if host is not None:
        copies = host.copies([*flat, *weights])
        flat, weights = copies[: len(flat)], copies[len(flat) :]
    pairs = []
    remaining = iter(flat)
    weight_of = {id(span): weight for span, weight in zip(compared, weights, strict=True)}
    for span in spans:
        row = {kind: next(remaining) for kind in ("weight", *span.moments)}
        if id(span) in weight_of:
            name = span.sections[0].name if span.sections else "a parameter that is not saved"
            pairs.append((name, row["weight"], weight_of[id(span)]))
        for part in split_interval(span.sections, span.shape, span.start, span.length):
            section = part.section
            if not section.counted:
                continue
            held = Box(section.offset, section.extent)
            for kind, value in row.items():
                piece = value.narrow(0, part.begin, part.length)
                writer.add_span(section.name, kind, section.global_shape, held, part.start, piece)
    return pairs


def generator_states(rank: int) -> dict[str, Tensor]:
    """Return the states of torch's generators. Training steps do not draw from them; a user's own model may."""
    states = {f"rng.rank_{rank:05d}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.rank_{rank:05d}.cuda"] = torch.cuda.get_rng_state()
    return states


def _other_files(directory: Path, written: set[str], algorithm: str) -> list[FileRecord]:
    """Fsync the files that no rank's writer wrote, such as the tokenizer's, and return their records."""
    records: list[FileRecord] = []
    for path in sorted(directory.iterdir()):
        if path.name not in written:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            checksum = file_checksum(path, algorithm=algorithm)
            records.append({"name": path.name, "size": path.stat().st_size, "checksum": checksum})
    return records


def _reason(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {error.strerror or error}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
