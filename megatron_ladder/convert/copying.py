"""Executes a plan: each source tensor is read once, a few rows at a time, and its rows are written to their targets.

    for each tensor, for each block of rows:
        read     the rows from the boxes that hold them
        cast     if the element type changes
        append   each target's part of the rows to its file

A file is written under a temporary name, fsynced, and renamed after its last byte; a conversion that is started again
skips the files that were renamed.
"""

import contextlib
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.checkpoint.boxes import Box, intersection
from megatron_ladder.checkpoint.checksum import CHECKSUMS, DEFAULT_CHECKSUM, file_checksum
from megatron_ladder.checkpoint.hf_directory import SourceTensor, StoredBox
from megatron_ladder.checkpoint.tensor_file import BY_NAME
from megatron_ladder.convert.measures import Measures
from megatron_ladder.convert.plan import CopiedTensor, CopyPlan, PlannedFile, TargetBox
from megatron_ladder.errors import UserError
from megatron_ladder.files import TEMPORARY_SUFFIX
from megatron_ladder.progress import ProgressBar

_ROWS_BYTES = 1 << 21
"""Bytes of the rows in memory at a time: few enough to stay in a cache between reading and writing."""
_RAW: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""Element size in bytes -> the integers that represent the elements here."""
_NATIVE: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}

_FILES_OPEN = 64

_EXPONENT = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits of an element that are all set in NaN and infinity only."""

RawArray = NDArray[np.unsignedinteger]


class UnusableNumberError(Exception):
    """A weight is not finite, or does not fit in the new element type."""


class _Reader:
    """Reads bytes of many files, and keeps only a few of them open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read_box(self, stored: StoredBox, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a box from `begin` on, relative to the box; raise as `read_into`."""
        if stored.mapped is None:
            self.read_into(stored.path, stored.begin + begin, out)
        else:
            out[:] = stored.mapped[stored.begin + begin : stored.begin + begin + len(out)]

    def read_into(self, path: Path, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `begin` on; raise UserError if it is too short or unreadable."""
        try:
            if path not in self._open:
                if len(self._open) >= _FILES_OPEN:
                    os.close(self._open.popitem(last=False)[1])
                self._open[path] = os.open(path, os.O_RDONLY)
            self._open.move_to_end(path)
            while out:
                count = os.preadv(self._open[path], [out], begin)
                if count == 0:
                    raise UserError(f"{path}: ends {len(out)} bytes before the end of a tensor")
                begin, out = begin + count, out[count:]
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])


class _FileInProgress:
    """A file of the plan that is being written."""

    def __init__(self, directory: Path, planned: PlannedFile, measures: Measures, checksum: bool) -> None:
        self._path = directory / planned.name
        self._partial = directory / (planned.name + TEMPORARY_SUFFIX)
        self._measures = measures
        self._descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._digest = CHECKSUMS[DEFAULT_CHECKSUM]() if checksum else None
        header = planned.header()
        self._missing = len(header) + planned.data_bytes
        self.append(memoryview(header))

    def append(self, data: memoryview) -> None:
        """Write the next bytes."""
        self._missing -= len(data)
        if self._digest is not None:
            with self._measures.checksum():
                self._digest.update(data)
        while data:
            data = data[os.write(self._descriptor, data) :]

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


def copy_tensors(
    plan: CopyPlan, directory: Path, measures: Measures, progress: ProgressBar, checksums: bool
) -> dict[str, str]:
    """Write the files of a plan that an earlier, interrupted conversion has not completed.

    A file with the planned name and size is complete.

    Returns:
        File name -> checksum; "" without `checksums`.

    Raises:
        UserError: a source cannot be read.
        UnusableNumberError: a weight is not finite, or a number does not fit in the new element type.
        OSError: writing fails.
    """
    done: dict[str, str] = {}
    planned = {file.name: file for file in plan.files}
    for name, expected in planned.items():
        path = directory / name
        if path.is_file() and path.stat().st_size == expected.size:
            with measures.checksum():
                done[name] = file_checksum(path) if checksums else ""
            progress.advance(expected.data_bytes)
    written: dict[str, _FileInProgress] = {}
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(contextlib.closing(_Reader()))
        for tensor in plan.tensors:
            targets = [target for target in tensor.boxes if target.file not in done]
            for target in targets:
                if target.file not in written:
                    file = written[target.file] = _FileInProgress(directory, planned[target.file], measures, checksums)
                    stack.callback(file.close)
            for target, data in _target_bytes(tensor, reader, targets):
                if tensor.kind == "weight" and not _is_finite(data, tensor.dtype):
                    paths = ", ".join(sorted({str(stored.path) for stored in tensor.source.boxes}))
                    raise UnusableNumberError(f"{paths}: {tensor.source.name}: contains NaN or infinity")
                written[target.file].append(data)
                progress.advance(len(data))
            measures.sample_memory()
            for target in targets:
                checksum = written[target.file].finish()
                if checksum is not None:
                    done[target.file] = checksum
    return done


def _is_finite(data: memoryview, dtype: str) -> bool:
    exponent = _RAW[BY_NAME[dtype].size].type(_EXPONENT[dtype])
    return bool((np.frombuffer(data, exponent.dtype) & exponent).max() < exponent)


def _target_bytes(
    tensor: CopiedTensor, reader: _Reader, targets: Sequence[TargetBox]
) -> Iterator[tuple[TargetBox, memoryview]]:
    """Yield the bytes of a tensor for each of the targets, block by block; the memory is reused for the next block."""
    for rows, array in _tensor_rows(tensor, reader, [target.box for target in targets]):
        for target in targets:
            if (shared := intersection(target.box, rows)) is not None:
                yield target, _as_bytes(array[shared.within(rows).slices()])


def _tensor_rows(tensor: CopiedTensor, reader: _Reader, wanted: Sequence[Box]) -> Iterator[tuple[Box, RawArray]]:
    """Yield blocks of rows in the new element type as unsigned integers; the array is reused for the next block.

    Blocks that share no elements with the boxes `wanted` are skipped.

    Raises:
        UserError: a source cannot be read.
        UnusableNumberError: a number does not fit in the new element type.
    """
    source = tensor.source
    raw = _RAW[BY_NAME[source.dtype].size]
    wider = max(BY_NAME[tensor.dtype].size, raw.itemsize)
    at_once = max(1, _ROWS_BYTES // (math.prod(source.shape[1:]) * wider))
    buffer = np.empty((min(at_once, source.shape[0]), *source.shape[1:]), raw)
    for first in range(0, source.shape[0], at_once):
        count = min(at_once, source.shape[0] - first)
        rows = Box((first, *(0 for _ in source.shape[1:])), (count, *source.shape[1:]))
        if not any(intersection(box, rows) for box in wanted):
            continue
        array = buffer[:count]
        if source.order is not None and source.order.dim == 0:
            _read_ordered_rows(source, reader, source.order.source[first : first + count], array)
        else:
            _read_rows(source, reader, first, array)
        if source.order is not None and source.order.dim == 1:
            array = array[:, source.order.source]
        try:
            yield rows, _cast(array, source.dtype, tensor.dtype)
        except OverflowError as error:
            reason = f"{error} does not fit in {tensor.dtype}; choose another --dtype"
            raise UnusableNumberError(f"{source.name}: {reason}") from None


def _read_rows(source: SourceTensor, reader: _Reader, first: int, out: RawArray) -> None:
    """Fill `out` with the rows from `first` on."""
    rows = Box((first, *(0 for _ in source.shape[1:])), out.shape)
    for stored, shared in source.overlapping(rows):
        row_bytes = out.itemsize * math.prod(stored.box.extent[1:])
        begin = (shared.offset[0] - stored.box.offset[0]) * row_bytes
        part = out[shared.within(rows).slices()]
        read = part if part.flags.c_contiguous else np.empty(part.shape, out.dtype)
        reader.read_box(stored, begin, _as_bytes(read))
        if read is not part:
            part[...] = read


def _read_ordered_rows(source: SourceTensor, reader: _Reader, order: NDArray[np.int64], out: RawArray) -> None:
    """Fill `out` with these rows; neighbours are read at once."""
    ends = np.append(np.flatnonzero(np.diff(order) != 1) + 1, len(order))
    begin = 0
    for end in ends.tolist():
        _read_rows(source, reader, int(order[begin]), out[begin:end])
        begin = end


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
    wrong: dict[str, str] = {}
    position = {file.name: len(file.header()) for file in plan.files}
    try:
        with contextlib.closing(_Reader()) as reader:
            for tensor in plan.tensors:
                for target, expected in _target_bytes(tensor, reader, tensor.boxes):
                    path, found = directory / target.file, memoryview(bytearray(len(expected)))
                    try:
                        reader.read_into(path, position[target.file], found)
                    except UserError:
                        found = memoryview(b"")
                    if found != expected:
                        wrong.setdefault(target.file, f"{path}: {target.key} differs from its source")
                    position[target.file] += len(expected)
                    progress.advance(len(expected))
                measures.sample_memory()
    finally:
        for file in wrong:
            (directory / file).unlink()
    if wrong:
        raise RuntimeError("; ".join([*wrong.values(), "removed; the same command writes these files again"]))


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
    if target == "bfloat16":
        wide = wide.astype(np.float32, copy=False)
        bits = wide.view(np.uint32)
        narrow = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
        narrow[np.isnan(wide)] = 0x7FC0
        infinite = (narrow & 0x7FFF) == 0x7F80
    else:
        with np.errstate(over="ignore"):
            converted = wide.astype(_NATIVE[target])
        narrow, infinite = converted.view(_RAW[converted.itemsize]), np.isinf(converted)
    if infinite.any() and np.isfinite(wide[infinite]).any():
        raise OverflowError(f"the value {np.abs(wide[np.isfinite(wide)]).max():.3g}")
    return narrow
