"""A checkpoint on disk, written by many ranks and read by any number of others, in any layout.

    SAVE/iter_0000100/manifest.json                      what there is (see `manifest`)
    SAVE/iter_0000100/weights_rank_00000.safetensors     boxes of the weights that rank 0 wrote
    SAVE/iter_0000100/optimizer_rank_00000.safetensors   boxes of master weights and moments
    SAVE/iter_0000100/rng_rank_00000.safetensors         states of random number generators
    SAVE/iter_0000100/tokenizer.json                     whatever belongs to the model

The unit is a box, a rectangular part of a canonical tensor: its name and kind, the tensor's shape, the box's
offset and extent. Tensors' names know no layout, and neither do the boxes: a reader takes the elements it
needs out of whichever boxes hold them. There is no pickle. Needs no process group, and torch only where tensors are
read and written.
"""

from __future__ import annotations

import mmap
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ladder.checkpoint.boxes import Box, cut_span, flat_range, intersection, row_major_strides
from megatron_ladder.checkpoint.checksum import algorithm_of, file_checksum
from megatron_ladder.checkpoint.header import BY_NAME, BY_STORED_NAME, FilePlace, element_name, read_header
from megatron_ladder.checkpoint.manifest import (
    StoredTensor,
    TensorTable,
    decode_manifest,
)
from megatron_ladder.checkpoint.publish import (
    LATEST_NAME,
    MANIFEST_NAME,
    is_published_name,
    published_checkpoints,
    publishing_order,
    read_latest,
)
from megatron_ladder.errors import UserError

if TYPE_CHECKING:
    # What only looks at checkpoints starts without torch, which takes seconds to import.
    import torch

Progress = Callable[[int, int], None]
"""Told of bytes done and bytes in all."""

_VERIFYING_THREADS = 8
_MISTAKES_NAMED = 20
_CONVERTIBLE_KINDS = ("weight", "master")
"""Optimizer moments and generator states must come back as they went; weights may be cast on reading."""


class TensorInfo(NamedTuple):
    """What a stored tensor is."""

    global_shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """A whole checkpoint, open for reading. Opening reads the manifest; data files are opened when needed."""

    directory: Path
    manifest: dict[str, Any]
    """As described in `manifest`, without `tensors`."""
    warnings: tuple[str, ...]
    """What the user should be told about how this checkpoint was found."""

    def __init__(
        self, directory: Path, manifest: dict[str, Any], table: TensorTable, warnings: tuple[str, ...] = ()
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.warnings = warnings
        self._table = table
        self._headers: dict[str, dict[str, FilePlace]] = {}

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """Opens a checkpoint's directory, or the checkpoint in use of a directory of checkpoints.

        Raises:
            UserError: there is none, or none that is whole.
        """
        found = find_checkpoint(path)
        if found is None:
            raise UserError(f"{path}: there is no checkpoint here")
        return found

    @property
    def iteration(self) -> int:
        """Optimizer steps done."""
        return int(self.manifest["iteration"])

    @property
    def consumed_samples(self) -> int:
        """Training samples seen."""
        return int(self.manifest["consumed_samples"])

    def tensors(self, kind: str) -> dict[str, TensorInfo]:
        """Name -> shape and dtype of all stored tensors of a kind."""
        import torch

        table = self._table[kind]
        return {name: TensorInfo(stored.global_shape, getattr(torch, stored.dtype)) for name, stored in table.items()}

    def read(
        self, name: str, kind: str, offset: Sequence[int], extent: Sequence[int], out: torch.Tensor
    ) -> None:
        """Fills `out` with a box of a stored tensor, reading no other bytes than that box's.

        Args:
            out: [*extent], on any device, contiguous or not. Weights and master weights are converted to its
                dtype if that differs; other kinds are not.

        Raises:
            UserError: the tensor is not stored, or is too small or of another dtype, or its file is damaged.
            ValueError: `out` has another shape than the extent.
        """
        wanted = Box(tuple(offset), tuple(extent))
        if tuple(out.shape) != wanted.extent:
            raise ValueError(f"{name}: {wanted} cannot be read into a tensor of shape {list(out.shape)}")
        stored = self._stored(name, kind)
        if not wanted.lies_in(stored.global_shape):
            raise self._other_model(
                f"{kind} of {name} has the shape {list(stored.global_shape)}", str(wanted)
            )
        if element_name(out.dtype) != stored.dtype and kind not in _CONVERTIBLE_KINDS:
            raise UserError(
                f"{self.directory}: {kind} of {name} is stored as {stored.dtype}, and "
                f"{element_name(out.dtype)} is asked for: it cannot be converted without loss"
            )
        target = out.detach()
        for index in stored.overlapping(wanted):
            box = stored.box(index)
            shared = intersection(box, wanted)
            if shared is not None:
                place = self.place(stored, index)
                path = self.directory / stored.files[index]
                part = target[shared.within(wanted).slices()]
                _read_part(path, place, stored.dtype, shared.within(box), part)

    def read_span(
        self,
        name: str,
        kind: str,
        global_shape: Sequence[int],
        box_offset: Sequence[int],
        box_extent: Sequence[int],
        start: int,
        out_flat: torch.Tensor,
    ) -> None:
        """Fills `out_flat` with an interval of a flattened box; the inverse of `writer.CheckpointWriter.add_span`.

        Args:
            out_flat: [elements of the interval].

        Raises:
            UserError: as for `read`, or the stored tensor has another shape than `global_shape`.
        """
        stored = self._stored(name, kind)
        if stored.global_shape != tuple(global_shape):
            found = f"{kind} of {name} has the shape {list(stored.global_shape)}"
            raise self._other_model(found, f"a part of {list(global_shape)}")
        for box, begin in cut_span(Box(tuple(box_offset), tuple(box_extent)), start, out_flat.numel()):
            piece = out_flat[begin : begin + box.numel].view(box.extent)
            self.read(name, kind, box.offset, box.extent, piece)

    def verify(self, progress: Progress | None = None, rank: int = 0, ranks: int = 1) -> None:
        """Reads files, in parallel, and compares checksums and headers with the manifest.

        Args:
            progress: called from several threads, one at a time.
            rank, ranks: which share of the files, of how many; together the shares are all files. A rank's is what
                the rank of that number has written, and so what it reads again if the layout is the same.

        Raises:
            UserError: a line for each damaged file: what was expected and what was found.
        """
        records = [record for record in self.manifest["files"] if _writer_of(record["name"]) % ranks == rank]
        total, done, lock = sum(record["size"] for record in records), 0, threading.Lock()

        def report(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                if progress is not None:
                    progress(done, total)

        def fault(record: dict[str, Any]) -> str | None:
            path = self.directory / record["name"]
            try:
                found = file_checksum(path, report, algorithm_of(record["checksum"]))
            except OSError as error:
                return f"{path}: cannot be read: {error.strerror}"
            expected = record["checksum"]
            if found == expected:
                return None
            return f"{path}: damaged: the manifest has the checksum {expected}, and its contents have {found}"

        with ThreadPoolExecutor(_VERIFYING_THREADS) as threads:
            faults = [line for line in threads.map(fault, records) if line is not None]
        _raise_mistakes(faults)
        own = {record["name"] for record in records}
        for tensors in self._table.values():
            for stored in tensors.values():
                for index, file in enumerate(stored.files):
                    if file in own:
                        self.place(stored, index)

    def _stored(self, name: str, kind: str) -> StoredTensor:
        if name not in self._table[kind]:
            raise self._other_model(f"there is {kind} of {len(self._table[kind])} tensors", name)
        return self._table[kind][name]

    def _other_model(self, found: str, wanted: str) -> UserError:
        return UserError(f"{self.directory}: {found}, and {wanted} is asked for: it is of another model")

    def stored(self, kind: str) -> dict[str, StoredTensor]:
        """Name -> boxes of all stored tensors of a kind."""
        return dict(self._table[kind])

    def place(self, stored: StoredTensor, index: int) -> FilePlace:
        """Where a box lies, once its file's header agrees with the manifest; raises UserError if it does not."""
        file, key = stored.files[index], stored.keys[index]
        path = self.directory / file
        if file not in self._headers:
            self._headers[file] = read_header(path)
        place = self._headers[file].get(key)
        if place is None:
            raise UserError(f"{path}: there is no tensor {key!r}, which the manifest lists")
        box = stored.box(index)
        if place.shape != box.extent or BY_STORED_NAME.get(place.dtype) != BY_NAME[stored.dtype]:
            raise UserError(
                f"{path}: {key!r} is {place.dtype} of shape {list(place.shape)}, and the manifest lists "
                f"{stored.dtype} of shape {list(box.extent)}"
            )
        return place


def find_checkpoint(
    save: Path, *, verify: bool = False, progress: Progress | None = None
) -> Checkpoint | None:
    """The checkpoint to go on from in a directory of checkpoints, or a checkpoint's own directory opened.

    It is the one that `latest` names. If that is not whole, the newest whole one before it is taken, or else
    the newest of all; `Checkpoint.warnings` then says so.

    Args:
        save: the directory of a run's checkpoints, or one checkpoint in it.
        verify: whether checksums must agree for a checkpoint to count as whole.
        progress: of verifying.

    Returns:
        None if the directory does not exist or holds no checkpoints.

    Raises:
        UserError: there are checkpoints, and none is whole; each is named, and why.
    """
    if (save / MANIFEST_NAME).is_file() or (is_published_name(save.name) and save.exists()):
        return _open_whole(save, verify, progress)
    if save.exists() and not save.is_dir():
        raise UserError(f"{save}: is a file, not a directory of checkpoints")
    candidates, faults = checkpoint_candidates(save)
    if not candidates and not faults:
        return None
    for name in candidates:
        try:
            found = _open_whole(save / name, verify, progress)
        except UserError as error:
            faults.extend(error.mistakes)
            continue
        if faults:
            found.warnings = (*faults, f"{save / name}: is used instead")
        return found
    raise UserError(f"{save}: none of its {len(candidates)} checkpoints is whole", *faults)


def checkpoint_candidates(save: Path) -> tuple[list[str], list[str]]:
    """Names of the checkpoints in a directory in the order in which they are to be tried, and what is wrong with it.

    The one that `latest` names comes first, then those before it, the newest first, then those after it.
    """
    latest, names = read_latest(save), published_checkpoints(save)
    candidates = names[::-1]
    if latest is None:
        return candidates, [f"{save / LATEST_NAME}: is missing"] if names else []
    faults = []
    if latest not in names:
        faults.append(f"{save / LATEST_NAME}: names {latest or 'no checkpoint'!r}, which is not there")
    if latest:
        candidates.sort(key=lambda name: publishing_order(name) > publishing_order(latest))
    return candidates, faults


def _open_whole(directory: Path, verify: bool, progress: Progress | None) -> Checkpoint:
    path = directory / MANIFEST_NAME
    try:
        manifest, table = decode_manifest(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    faults = [_file_fault(directory, record) for record in manifest["files"]]
    _raise_mistakes([line for line in faults if line is not None])
    checkpoint = Checkpoint(directory, manifest, table)
    if verify:
        checkpoint.verify(progress)
    return checkpoint


def _writer_of(name: str) -> int:
    """The rank that wrote a file, as its name tells."""
    match = re.search(r"_rank_(\d{5,9})\.", name)
    return 0 if match is None else int(match[1])


def _file_fault(directory: Path, record: dict[str, Any]) -> str | None:
    path = directory / record["name"]
    if path.resolve().parent != directory.resolve():
        return f"{path}: is a link that leads out of the checkpoint's directory"
    if not path.is_file():
        return f"{path}: is missing, or not a file"
    size = path.stat().st_size
    if size != record["size"]:
        return f"{path}: cut off or changed: the manifest has {record['size']} bytes, and it has {size}"
    return None


def _raise_mistakes(mistakes: list[str]) -> None:
    if len(mistakes) > _MISTAKES_NAMED:
        mistakes = [*mistakes[:_MISTAKES_NAMED], f"and {len(mistakes) - _MISTAKES_NAMED} files more"]
    if mistakes:
        raise UserError(*mistakes)


def _read_part(path: Path, place: FilePlace, dtype_name: str, part: Box, out: torch.Tensor) -> None:
    """Reads the box `part` of the tensor at `place` into `out`, which has its extent."""
    import torch

    from megatron_ladder.checkpoint.tensor_file import bytes_of

    dtype: torch.dtype = getattr(torch, dtype_name)
    first, end = flat_range(place.shape, part)
    begin = place.begin + first * dtype.itemsize
    plain = out.is_contiguous() and out.dtype == dtype and out.device.type == "cpu"
    try:
        with open(path, "rb", buffering=0) as file:
            if plain and end - first == part.numel:
                file.seek(begin)
                remaining = bytes_of(out)
                while count := file.readinto(remaining):
                    remaining = remaining[count:]
                if remaining:
                    raise UserError(f"{path}: ends {len(remaining)} bytes before the end of a tensor in it")
                return
            page = begin - begin % mmap.ALLOCATIONGRANULARITY
            length = place.begin + end * dtype.itemsize - page
            # A private copy-on-write mapping, since torch warns of read-only memory; nothing writes to it.
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=page)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    flat = torch.frombuffer(mapped, dtype=dtype, count=end - first, offset=begin - page)
    out.copy_(flat.as_strided(part.extent, row_major_strides(place.shape)))
