"""One save of a training run's state, in two parts: what needs all ranks and the state, and what needs neither.

    begin   every rank notes what it will write, or copies it to host memory; rank 0 looks for room and makes a
            directory. Collectives run here.
    write   every rank writes its files, then rank 0 has the others' indices gathered and publishes. The caller says
            how they are gathered: by a collective, or through files when this runs beside training.

A save that fails removes what it wrote, leaves all earlier checkpoints as they were, and says why in one sentence.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ladder.checkpoint.checksum import DEFAULT_CHECKSUM, file_checksum
from megatron_ladder.checkpoint.host_memory import HostMemory
from megatron_ladder.checkpoint.manifest import FileIndex, FileRecord, merge_manifest
from megatron_ladder.checkpoint.optimizer_state import MOMENTS, OptimizerState, Span
from megatron_ladder.checkpoint.publish import (
    create_temporary_directory,
    publish,
    temporary_directory,
    write_manifest,
)
from megatron_ladder.checkpoint.retention import Retention, remove_old_checkpoints
from megatron_ladder.checkpoint.writer import CheckpointWriter
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.parallel.layout import split_interval

ROOM_FOR_THE_REST = 1 << 20
"""Bytes besides tensors that a save needs at least: manifest, headers, tokenizer, the file system's own."""

Gather = Callable[[Any], list[Any]]
"""Takes a rank's JSON-able value, and returns those of all ranks on rank 0."""


class SaveError(Exception):
    """A checkpoint could not be written; those before it are as they were."""


@dataclass(frozen=True)
class SaveOptions:
    """How a save is made."""

    checksum: str = DEFAULT_CHECKSUM
    """Algorithm."""
    retention: Retention = field(default_factory=Retention)
    """What goes once it is published."""
    host: HostMemory | None = None
    """Where the state is copied to, so that training may go on while it is written; None writes it from where it
    lies."""


class SaveOutcome(NamedTuple):
    """What became of a save, on rank 0."""

    directory: str
    """The published checkpoint; empty if there is none."""
    error: str | None
    """Why there is none."""
    removed: tuple[str, ...] = ()
    """Checkpoints that were removed after it."""
    notes: tuple[str, ...] = ()
    """A line for everything that could not be removed, which costs room alone."""


class MasterPair(NamedTuple):
    """A weight that the model computes with, and the master that it must be the rounded value of."""

    name: str
    master: Tensor
    weight: Tensor


class TrainingSave:
    """A save that has begun; `write` ends it."""

    def __init__(
        self,
        save: Path,
        directory: Path,
        header: Mapping[str, Any],
        writer: CheckpointWriter,
        pairs: Sequence[MasterPair],
        room: "_Room",
        add_files: Callable[[Path], None],
        options: SaveOptions,
    ) -> None:
        """See `begin`."""
        self.directory = directory
        self.total_bytes = room.total_bytes
        self.iteration = int(header["iteration"])
        self._save = save
        self._notes = room.notes
        self._header = header
        self._writer = writer
        self._pairs = pairs
        self._add_files = add_files
        self._options = options

    @staticmethod
    def begin(
        save: Path,
        header: Mapping[str, Any],
        state: OptimizerState,
        world: CommGroup,
        add_files: Callable[[Path], None],
        options: SaveOptions,
    ) -> "TrainingSave":
        """Notes or copies the state, and makes room for it; every rank must call it.

        Without `options.host` the state must not change until `write` has returned.

        Raises:
            SaveError: on every rank: there is no room, or no directory can be made.
        """
        spans = [span for span in state.spans() if span.owned]
        values = [[span.master, *(state.moment(span, which) for which in MOMENTS)] for span in spans]
        own_bytes = sum(value.nbytes for row in values for value in row)
        iteration = int(header["iteration"])
        sizes = world.gather_objects(own_bytes)
        answer = world.broadcast_object(_make_room(save, iteration, sum(sizes)) if world.rank == 0 else None)
        if answer.error is not None:
            raise SaveError(answer.error)
        directory = temporary_directory(save, iteration, answer.token)
        writer = CheckpointWriter(directory, world.rank, options.checksum)
        pairs = _note_state(writer, spans, values, options.host)
        for name, generator_state in generator_states(world.rank).items():
            writer.add(name, "rng", tuple(generator_state.shape), (0,), generator_state)
        whole = {**header, "optimizer": {"steps_taken": state.steps_taken(), "loss_scaler": state.loss_scaler()}}
        return TrainingSave(save, directory, whole, writer, pairs, answer, add_files, options)

    def write(self, gather: Gather) -> SaveOutcome | None:
        """Writes this rank's files; on rank 0 waits for the others and publishes.

        Raises:
            RuntimeError: on rank 0: a weight is not the rounded master, on some rank.
        """
        try:
            parts = gather(self._write_own())
        except TimeoutError as error:
            return self._give_up(str(error))
        if not parts:
            return None
        faults = [part["fault"] for part in parts if "fault" in part]
        if faults:
            self._give_up("")
            raise RuntimeError(faults[0])
        errors = list(dict.fromkeys(part["error"] for part in parts if "error" in part))
        if errors:
            return self._give_up("; ".join(errors))
        try:
            published = self._publish([part["index"] for part in parts])
        except OSError as error:
            return self._give_up(_sentence(error, self.directory))
        try:
            removed = remove_old_checkpoints(self._save, self._options.retention)
        except OSError as error:
            # Which of them are to go cannot be told.
            notes = (*self._notes, f"old checkpoints stay: {_sentence(error, self._save)}")
            return SaveOutcome(str(published), None, (), notes)
        return SaveOutcome(str(published), None, removed.names, self._notes + removed.notes)

    def _write_own(self) -> dict[str, Any]:
        """This rank's part of the outcome."""
        for name, master, weight in self._pairs:
            if not torch.equal(master.to(weight.device, weight.dtype), weight):
                return {"fault": f"the fp32 master of {name} is not the model's weight"}
        try:
            return {"index": self._writer.finish()}
        except OSError as error:
            self._writer.discard()
            return {"error": _sentence(error, self.directory)}

    def _publish(self, indices: list[FileIndex]) -> Path:
        self._add_files(self.directory)
        written = {record["name"] for index in indices for record in index["files"]}
        indices.append({"files": _other_files(self.directory, written, self._options.checksum), "boxes": []})
        write_manifest(self.directory, merge_manifest(self._header, indices), self._options.checksum)
        return publish(self.directory, self._save, self.iteration)

    def _give_up(self, why: str) -> SaveOutcome:
        shutil.rmtree(self.directory, ignore_errors=True)
        return SaveOutcome("", why, (), self._notes)


class _Room(NamedTuple):
    token: str
    total_bytes: int
    error: str | None = None
    notes: tuple[str, ...] = ()


def _make_room(save: Path, iteration: int, total_bytes: int) -> _Room:
    """Makes the directory of a save, if the file system has room for what all ranks will write."""
    token = secrets.token_hex(8)
    needed = total_bytes + ROOM_FOR_THE_REST
    notes: list[str] = []
    try:
        directory = create_temporary_directory(save, iteration, token, notes.append)
        found = os.statvfs(save)
        free = found.f_bavail * found.f_frsize
        # Some network file systems do not say how large they are.
        if found.f_blocks and free < needed:
            directory.rmdir()
            return _Room("", total_bytes, f"a checkpoint needs {_size(needed)}, and {_size(free)} are free in {save}")
    except OSError as error:
        return _Room("", total_bytes, _sentence(error, save))
    return _Room(token, total_bytes, None, tuple(notes))


def _note_state(
    writer: CheckpointWriter, spans: Sequence[Span], values: Sequence[Sequence[Tensor]], host: HostMemory | None
) -> list[MasterPair]:
    """Gives the writer every run of every parameter; returns what is to be compared before it is written."""
    # In fp32 without ZeRO they are one tensor.
    compared = [span for span in spans if span.weight.data_ptr() != span.master.data_ptr()]
    flat = [value for row in values for value in row]
    weights = [span.weight for span in compared]
    if host is not None:
        copies = host.copies([*flat, *weights])
        flat, weights = copies[: len(flat)], copies[len(flat) :]
    kinds = ("weight", *MOMENTS)
    pairs = []
    kept = iter(flat)
    of_weight = {id(span): weight for span, weight in zip(compared, weights, strict=True)}
    for span in spans:
        row = {kind: next(kept) for kind in kinds}
        if id(span) in of_weight:
            name = span.sections[0].name if span.sections else "a parameter that is not saved"
            pairs.append(MasterPair(name, row["weight"], of_weight[id(span)]))
        for part in split_interval(span.sections, span.shape, span.start, span.length):
            box = part.section
            if box.counted:
                for kind, value in row.items():
                    piece = value.narrow(0, part.begin, part.length)
                    writer.add_span(box.name, kind, box.global_shape, box.offset, box.extent, part.start, piece)
    return pairs


def generator_states(rank: int) -> dict[str, Tensor]:
    """States of torch's generators. Nothing here draws from them in a step; a user's own model may."""
    states = {f"rng.rank_{rank:05d}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.rank_{rank:05d}.cuda"] = torch.cuda.get_rng_state()
    return states


def _other_files(directory: Path, written: set[str], algorithm: str) -> list[FileRecord]:
    """Records of files that are not a rank's, such as a tokenizer's, which are fsynced here."""
    records: list[FileRecord] = []
    for path in sorted(directory.iterdir()):
        if path.name not in written:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            checksum = file_checksum(path, lambda count: None, algorithm)
            records.append({"name": path.name, "size": path.stat().st_size, "checksum": checksum})
    return records


def _sentence(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {error.strerror or error}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
