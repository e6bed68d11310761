"""One save of a training run's state, in two parts: the first needs all ranks and the state, `write` needs neither.

    begin   every rank records what it will write, or copies it to host memory; rank 0 checks for room and creates a
            directory. Collectives run here.
    write   every rank writes its files; rank 0 gathers the indices of all ranks and publishes. The caller chooses how
            they are gathered: by a collective, or through files when this runs alongside training.

A save that fails removes what it wrote, leaves all earlier checkpoints unchanged, and reports one reason.
"""

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.checkpoint.manifest import (
    KINDS,
    BoxRecord,
    FileRecord,
    Index,
    Tiling,
    file_name,
    make_index,
    merge_manifest,
)
from megatron_ladder.checkpoint.optimizer_state import OptimizerState, Piece
from megatron_ladder.checkpoint.publish import (
    Retention,
    create_temporary_directory,
    publish,
    remove_old_checkpoints,
    temporary_directory,
    write_manifest,
)
from megatron_ladder.checkpoint.tensor_file import box_key, element_name, file_checksum, write_tensor_file
from megatron_ladder.comm.agreement import name_ranks
from megatron_ladder.comm.group import CommGroup
from megatron_ladder.files import temporary_path

_OTHER_BYTES = 1 << 20
"""Room that a save needs besides its tensors: manifest, headers, tokenizer, overhead of the file system."""
_ALIGNMENT = 256
"""Bytes; every copy begins at a multiple, so that any element type can be viewed there."""
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context."""
_POLL_SECONDS = 0.05
T = TypeVar("T")
Gather = Callable[[bytes], list[bytes]]
"""Receives the bytes of a rank, and returns those of all ranks on rank 0."""


class SaveError(Exception):
    """A checkpoint could not be written; earlier ones are unchanged."""


def _write_pieces(directory: Path, rank: int, pieces: Sequence[Piece]) -> Index:
    """Write and fsync the files of a rank, and return their index; raise FileExistsError if it wrote here before."""
    files: dict[str, list[tuple[str, Tensor]]] = {}
    boxes: dict[tuple[str, str], list[BoxRecord]] = {}
    for name, kind, shape, box, tensor in pieces:
        assert box.fits(shape) and tensor.is_contiguous(), f"{name}: not a box of shape {list(shape)}"
        files.setdefault(file_name(kind, rank), []).append((box_key(kind, name, box), tensor))
        boxes.setdefault((kind, name), []).append(BoxRecord(box.offset, box.extent, rank))
    records = [FileRecord(name, *write_tensor_file(directory / name, tensors)) for name, tensors in files.items()]
    tensors_of_rank = {}
    for piece in pieces:
        tiling = Tiling(tuple(piece.shape), tuple(boxes[piece.kind, piece.name]))
        tensors_of_rank[piece.kind, piece.name] = (element_name(piece.tensor.dtype), tiling)
    return make_index(records, tensors_of_rank)


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


class HostMemory:
    """Host memory for the state of one save, reused by the next: pinning it takes longer than filling it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._pinned = False

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies in host memory, complete on return and valid until the next call.

        Copies from a GPU are queued together on the current stream, behind the work that computes the tensors.
        """
        *offsets, end = accumulate((-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors), initial=0)
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        if self._buffer is None or self._buffer.numel() < end:
            self.free()
            self._buffer = torch.empty(end, dtype=torch.uint8)
            self._pinned = bool(devices) and _pin(self._buffer, next(iter(devices)))
        copied = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            copy = self._buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copied.append(copy.copy_(tensor.detach(), non_blocking=True))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copied

    def free(self) -> None:
        if self._buffer is not None and self._pinned:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())))
        self._buffer = None
        self._pinned = False


def _pin(buffer: Tensor, device: torch.device) -> bool:
    """Page-lock a buffer, so that GPUs copy into it directly; return False if the system refuses.

    torch's own pinned memory comes in powers of two, up to twice the size needed.
    """
    try:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE)))
    except torch.cuda.CudaError:
        # CUDA reports the error again at the next launch; an unneeded kernel clears it.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=device).zero_()
        return False
    return True


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
        spans = (span for span in (*state.spans(), *state.states()) if span.owned)
        pieces = [piece for span in spans for piece in span.pieces(state, only_counted=True)]
        self.iteration = int(header["iteration"])
        self._save = save
        self._add_files = add_files
        self._retention = retention or Retention()
        sizes = world.gather_objects(sum(piece.tensor.nbytes for piece in pieces))
        room = (*_make_room(save, self.iteration, sum(sizes)), sum(sizes)) if world.rank == 0 else None
        token, error, self.total_bytes = world.broadcast_object(room)
        if error is not None:
            raise SaveError(error)
        self.directory = temporary_directory(save, self.iteration, token)
        if host is not None:
            copies = host.copies([piece.tensor for piece in pieces])
            pieces = [piece._replace(tensor=copy) for piece, copy in zip(pieces, copies, strict=True)]
        for name, generator in generator_states(world.rank).items():
            pieces.append(Piece(name, "rng", generator.shape, Box.whole(generator.shape), generator))
        self._rank = world.rank
        self._pieces = pieces
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
        for piece in sorted(self._pieces, key=lambda piece: piece.kind != "weight"):
            # One pass without a copy; a NaN is both the smallest and the largest element.
            if piece.tensor.is_floating_point() and not torch.stack(torch.aminmax(piece.tensor)).isfinite().all():
                return _Part(not_finite=f"{piece.kind} of {piece.name}")
        try:
            return _Part(_write_pieces(self.directory, self._rank, self._pieces))
        except OSError as error:
            # Frees room on a full disk, so that the hand-over file can be written.
            for kind in KINDS:
                (self.directory / file_name(kind, self._rank)).unlink(missing_ok=True)
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
    token = secrets.token_hex(8)
    needed = total_bytes + _OTHER_BYTES
    try:
        directory = create_temporary_directory(save, iteration, token)
        system = os.statvfs(save)
        free = system.f_bavail * system.f_frsize
        # Some network file systems do not report their size.
        if system.f_blocks and free < needed:
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


def run_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` in a daemon thread. Unlike a thread of an executor, it never keeps the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def gather_through_files(directory: Path, rank: int, size: int, timeout_seconds: float, value: bytes) -> list[bytes]:
    """Gather the bytes of every rank on rank 0 through files in a shared directory.

    Saves in the background finish at different times on every rank, while the training threads use the process groups,
    which two threads must not share. All ranks write to one directory anyway. Returns the values in rank order on rank
    0, after removing the files; [] on other ranks, without waiting. Raises TimeoutError if ranks write nothing in time.
    """
    files = [directory / f".written_by_rank_{number:05d}.json" for number in range(size)]
    if rank != 0:
        # If the disk is full even for this file, rank 0 notices by waiting.
        with contextlib.suppress(OSError):
            temporary = temporary_path(files[rank])
            temporary.write_bytes(value)
            os.replace(temporary, files[rank])
        return []
    deadline = time.monotonic() + timeout_seconds
    while missing := _missing(directory, files):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name_ranks(missing)} did not finish writing in {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS)
    values = [value, *(file.read_bytes() for file in files[1:])]
    for file in files[1:]:
        file.unlink()
    return values


def _missing(directory: Path, files: Sequence[Path]) -> list[int]:
    """Return the ranks except 0 whose file does not exist yet, in one operation for any number of ranks."""
    present = set(os.listdir(directory))
    return [number for number, file in enumerate(files) if number and file.name not in present]
