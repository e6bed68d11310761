"""Executes a plan: each source tensor is read once, a few rows at a time, and its rows are written to their targets.

    for each tensor, for each block of rows:
        read     the rows from the boxes that hold them
        cast     if the element type changes
        append   each target's part of the rows to its file

A file is written under a temporary name, fsynced, and renamed after its last byte; a conversion that is started again
skips the files that were renamed.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.checkpoint.boxes import Box, intersection
from megatron_ladder.checkpoint.checksum import CHECKSUMS, DEFAULT_CHECKSUM, file_checksum
from megatron_ladder.checkpoint.tensor_file import BY_NAME
from megatron_ladder.convert.measures import Measures
from megatron_ladder.convert.plan import CopiedTensor, CopyPlan, PlannedFile
from megatron_ladder.convert.sources import Reader, SourceTensor
from megatron_ladder.errors import UserError
from megatron_ladder.files import TEMPORARY_SUFFIX
from megatron_ladder.progress import ProgressBar

_ROWS_BYTES = 1 << 21
"""Bytes of the rows in memory at a time: few enough to stay in a cache between reading and writing."""
_RAW: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""Element size in bytes -> the integers that represent the elements here."""
_NATIVE: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}

RawArray = NDArray[np.unsignedinteger]


class _FileInProgress:
    """A file of the plan that is being written."""

    def __init__(self, directory: Path, planned: PlannedFile, measures: Measures, checksum: bool) -> None:
        self._path = directory / planned.name
        self._partial = directory / (planned.name + TEMPORARY_SUFFIX)
        self._measures = measures
        self._descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._digest = CHECKSUMS[DEFAULT_CHECKSUM]() if checksum else None
        self._missing = planned.data_bytes
        self._put(memoryview(planned.header()))

    def append(self, data: memoryview) -> None:
        """Write the next bytes."""
        self._missing -= len(data)
        self._put(data)

    def finish(self) -> str | None:
        """Rename the file and return its checksum if all bytes are written; else return None."""
        if self._missing:
            return None
        os.fsync(self._descriptor)
        self.close()
        os.rename(self._partial, self._path)
        return "" if self._digest is None else f"{DEFAULT_CHECKSUM}:{self._digest.hexdigest()}"

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _put(self, data: memoryview) -> None:
        if self._digest is not None:
            with self._measures.checksum():
                self._digest.update(data)
        while data:
            data = data[os.write(self._descriptor, data) :]


def copy_tensors(
    plan: CopyPlan, directory: Path, measures: Measures, progress: ProgressBar, checksums: bool
) -> dict[str, str]:
    """Write the files of a plan that do not exist yet.

    Args:
        directory: target directory; a file with the planned name and size counts as complete.
        checksums: whether to compute checksums.

    Returns:
        File name -> checksum; "" without checksums.

    Raises:
        UserError: a source cannot be read, or a number does not fit the new element type.
        OSError: writing fails.
    """
    done = _complete_files(plan, directory, measures, progress, checksums)
    planned = {file.name: file for file in plan.files if file.name not in done}
    written: dict[str, _FileInProgress] = {}
    reader = Reader()
    try:
        for tensor in plan.tensors:
            targets = [target for target in tensor.boxes if target.file not in done]
            for target in targets:
                if target.file not in written:
                    written[target.file] = _FileInProgress(directory, planned[target.file], measures, checksums)
            for rows, array in _tensor_rows(tensor, reader, [target.box for target in targets]):
                for target in targets:
                    shared = intersection(target.box, rows)
                    if shared is not None:
                        data = _as_bytes(array[shared.within(rows).slices()])
                        written[target.file].append(data)
                        progress.advance(len(data))
            measures.sample_memory()
            for target in targets:
                checksum = written[target.file].finish()
                if checksum is not None:
                    done[target.file] = checksum
    finally:
        reader.close()
        for file in written.values():
            file.close()
    return done


def _complete_files(
    plan: CopyPlan, directory: Path, measures: Measures, progress: ProgressBar, checksums: bool
) -> dict[str, str]:
    """Return the checksums of the files that an earlier, interrupted conversion completed."""
    found = {}
    for file in plan.files:
        path = directory / file.name
        if path.is_file() and path.stat().st_size == len(file.header()) + file.data_bytes:
            with measures.checksum():
                found[file.name] = file_checksum(path, lambda count: None) if checksums else ""
            progress.advance(file.data_bytes)
    return found


def _tensor_rows(
    tensor: CopiedTensor, reader: Reader, wanted: Sequence[Box]
) -> Iterator[tuple[Box, RawArray]]:
    """Yield blocks of rows in the new element type as unsigned integers; the array is reused for the next block.

    Args:
        wanted: blocks that share no elements with these boxes are skipped.

    Raises:
        UserError: a source cannot be read, or a number does not fit in the new element type.
    """
    source = tensor.source
    at_once = max(1, _ROWS_BYTES // tensor.row_bytes)
    raw = _RAW[BY_NAME[source.dtype].size]
    buffer = np.empty((min(at_once, source.shape[0]), *source.shape[1:]), raw)
    for first in range(0, source.shape[0], at_once):
        count = min(at_once, source.shape[0] - first)
        rows = Box((first, *(0 for _ in source.shape[1:])), (count, *source.shape[1:]))
        if not any(intersection(box, rows) for box in wanted):
            continue
        array = buffer[:count]
        _read_rows(source, rows, array, reader)
        try:
            yield rows, _cast(array, source.dtype, tensor.dtype)
        except OverflowError as error:
            raise UserError(
                f"{source.name}: {error} does not fit in {tensor.dtype}; choose another --dtype"
            ) from None


def _read_rows(source: SourceTensor, rows: Box, out: RawArray, reader: Reader) -> None:
    """Fill `out` [*rows.extent] from the boxes that hold the rows."""
    for stored, shared in source.overlapping(rows):
        row_bytes = out.itemsize
        for size in stored.box.extent[1:]:
            row_bytes *= size
        begin = (shared.offset[0] - stored.box.offset[0]) * row_bytes
        part = out[shared.within(rows).slices()]
        if part.flags.c_contiguous:
            reader.read_box(stored, begin, _as_bytes(part))
        else:
            separate = np.empty(part.shape, part.dtype)
            reader.read_box(stored, begin, _as_bytes(separate))
            part[...] = separate


def _as_bytes(array: RawArray) -> memoryview:
    """Return the bytes of an array: its memory if it is contiguous, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def verify_files(plan: CopyPlan, directory: Path, measures: Measures, progress: ProgressBar) -> None:
    """Read source and target again, and compare them bit by bit.

    A wrong file is removed: otherwise it would count as complete when the same conversion is started again.

    Raises:
        UserError: a source cannot be read.
        RuntimeError: files are wrong; the message has the first wrong tensor of each.
    """
    reader = Reader()
    wrong: dict[str, str] = {}
    begins = {file.name: len(file.header()) for file in plan.files}
    offsets = {file.name: {key: entry["data_offsets"][0] for key, entry in file.entries.items()} for file in plan.files}
    try:
        for tensor in plan.tensors:
            done = dict.fromkeys((target.file for target in tensor.boxes), 0)
            for rows, array in _tensor_rows(tensor, reader, [target.box for target in tensor.boxes]):
                for target in tensor.boxes:
                    shared = intersection(target.box, rows)
                    if shared is None or target.file in wrong:
                        continue
                    expected = _as_bytes(array[shared.within(rows).slices()])
                    begin = begins[target.file] + offsets[target.file][target.key] + done[target.file]
                    path = directory / target.file
                    if not _holds(reader, path, begin, expected):
                        wrong[target.file] = f"{path}: {target.key} differs from its source"
                    done[target.file] += len(expected)
                    progress.advance(len(expected))
            measures.sample_memory()
    finally:
        reader.close()
        for file in wrong:
            (directory / file).unlink()
    if wrong:
        raise RuntimeError("; ".join([*wrong.values(), "removed; the same command writes these files again"]))


def _holds(reader: Reader, path: Path, begin: int, expected: memoryview) -> bool:
    """Return whether a file can be read from `begin` on and has these bytes there."""
    found = memoryview(bytearray(len(expected)))
    try:
        reader.read_into(path, begin, found)
    except UserError:
        return False
    return found == expected


def differ(one: SourceTensor, other: SourceTensor) -> bool:
    """Return whether two tensors of one shape and type differ; raise UserError if one cannot be read."""
    reader = Reader()
    copied = (CopiedTensor(tensor.name, "weight", tensor, tensor.dtype, ()) for tensor in (one, other))
    try:
        pairs = zip(*(_tensor_rows(tensor, reader, [one.whole]) for tensor in copied), strict=True)
        return not all(np.array_equal(left, right) for (_, left), (_, right) in pairs)
    finally:
        reader.close()


def _cast(raw: RawArray, source: str, target: str) -> RawArray:
    """Convert elements to another floating-point type, rounding to nearest, ties to even.

    Args:
        raw: elements of type `source` as unsigned integers of their size; any shape.
        source, target: `float32`, `bfloat16` or `float16`.

    Raises:
        OverflowError: a finite number is not finite in the new type.
    """
    if source == target:
        return raw
    wide = (raw.astype(np.uint32) << 16).view(np.float32) if source == "bfloat16" else raw.view(_NATIVE[source])
    if target != "bfloat16":
        with np.errstate(over="ignore"):
            narrow = wide.astype(_NATIVE[target])
        _check_range(wide, np.isinf(narrow))
        return narrow.view(_RAW[narrow.itemsize])
    return _float32_to_bfloat16(wide.astype(np.float32, copy=False))


def _float32_to_bfloat16(wide: NDArray[np.floating]) -> RawArray:
    bits = wide.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    rounded[np.isnan(wide)] = 0x7FC0
    _check_range(wide, (rounded & 0x7FFF) == 0x7F80)
    return rounded


def _check_range(wide: NDArray[np.floating], infinite: NDArray[np.bool_]) -> None:
    if infinite.any() and np.isfinite(wide[infinite]).any():
        raise OverflowError(f"the value {np.abs(wide[np.isfinite(wide)]).max():.3g}")
