"""Carries a plan out: each source tensor is read once, a few rows at a time, and its rows go where they belong.

    for each tensor, for each run of rows:
        read     the rows from the boxes that hold them
        cast     if the element type changes
        write    each target's part of the rows behind what its file has

What lies together in the source and in a target is passed on without being touched. A file is written under a
temporary name, fsynced and renamed when its last byte is there; a conversion that died goes on behind the files that
have their names.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.checkpoint.boxes import Box, intersection
from megatron_ladder.checkpoint.checksum import CHECKSUMS, DEFAULT_CHECKSUM, file_checksum
from megatron_ladder.checkpoint.header import BY_NAME
from megatron_ladder.convert.casts import RAW, cast
from megatron_ladder.convert.measures import Measures, Progress
from megatron_ladder.convert.plan import CopiedTensor, Plan, PlannedFile
from megatron_ladder.convert.sources import Reader, SourceTensor
from megatron_ladder.errors import UserError

ROWS_BYTES = 1 << 21
"""Bytes of the rows that are in memory at a time: few enough to stay in a cache between reading and writing."""
PARTIAL = ".partial"
"""Ends the name of a file that is not whole yet."""

RawArray = NDArray[np.unsignedinteger]


class _FileInProgress:
    """One file of the plan on its way to the disk."""

    def __init__(self, directory: Path, planned: PlannedFile, measures: Measures, checksum: bool) -> None:
        self._path = directory / planned.name
        self._partial = directory / (planned.name + PARTIAL)
        self._measures = measures
        self._descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._digest = CHECKSUMS[DEFAULT_CHECKSUM]() if checksum else None
        self._missing = planned.data_bytes
        self._put(memoryview(planned.header()))

    def append(self, data: memoryview) -> None:
        """Writes the next bytes."""
        self._missing -= len(data)
        self._put(data)

    def finish(self) -> str | None:
        """Gives the file its name, and returns its checksum, once it has all its bytes; else None."""
        if self._missing:
            return None
        os.fsync(self._descriptor)
        self.close()
        os.rename(self._partial, self._path)
        return "" if self._digest is None else f"{DEFAULT_CHECKSUM}:{self._digest.hexdigest()}"

    def close(self) -> None:
        """Leaves the file as it is."""
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
    plan: Plan, directory: Path, measures: Measures, progress: Progress, checksums: bool
) -> dict[str, str]:
    """Writes the files of a plan that are not there yet.

    Args:
        directory: of the files; what is in it under a file's name counts as whole.
        checksums: whether to take them.

    Returns:
        File name -> checksum; "" without checksums.

    Raises:
        UserError: a source cannot be read, or a number does not fit the new element type.
        OSError: writing fails.
    """
    taken = _taken_up(plan, directory, measures, progress, checksums)
    planned = {file.name: file for file in plan.files if file.name not in taken}
    written: dict[str, _FileInProgress] = {}
    reader = Reader()
    try:
        for tensor in plan.tensors:
            targets = [target for target in tensor.boxes if target.file not in taken]
            for target in targets:
                if target.file not in written:
                    written[target.file] = _FileInProgress(directory, planned[target.file], measures, checksums)
            for rows, array in tensor_rows(tensor, reader, [target.box for target in targets]):
                for target in targets:
                    shared = intersection(target.box, rows)
                    if shared is not None:
                        data = as_bytes(array[shared.within(rows).slices()])
                        written[target.file].append(data)
                        progress.add(len(data))
            for target in targets:
                checksum = written[target.file].finish()
                if checksum is not None:
                    taken[target.file] = checksum
    finally:
        reader.close()
        for file in written.values():
            file.close()
    return taken


def _taken_up(plan: Plan, directory: Path, measures: Measures, progress: Progress, checksums: bool) -> dict[str, str]:
    """Checksums of the files that a conversion which died has finished."""
    taken = {}
    for file in plan.files:
        path = directory / file.name
        if path.is_file() and path.stat().st_size == len(file.header()) + file.data_bytes:
            with measures.checksum():
                taken[file.name] = file_checksum(path, lambda count: None) if checksums else ""
            progress.add(file.data_bytes)
    return taken


def tensor_rows(
    tensor: CopiedTensor, reader: Reader, wanted: Sequence[Box]
) -> Iterator[tuple[Box, RawArray]]:
    """The rows of a tensor, in its new element type, as unsigned integers; the array is used again for the next ones.

    Args:
        wanted: rows that have nothing of these boxes are passed over.

    Raises:
        UserError: a source cannot be read, or a number does not fit the new element type.
    """
    source = tensor.source
    at_once = max(1, ROWS_BYTES // tensor.row_bytes)
    raw = RAW[BY_NAME[source.dtype].size]
    buffer = np.empty((min(at_once, source.shape[0]), *source.shape[1:]), raw)
    for first in range(0, source.shape[0], at_once):
        count = min(at_once, source.shape[0] - first)
        rows = Box((first, *(0 for _ in source.shape[1:])), (count, *source.shape[1:]))
        if not any(intersection(box, rows) for box in wanted):
            continue
        array = buffer[:count]
        _read_rows(source, rows, array, reader)
        try:
            yield rows, cast(array, source.dtype, tensor.dtype)
        except OverflowError as error:
            raise UserError(
                f"{source.name}: {error} does not fit {tensor.dtype}: give another --dtype"
            ) from None


def _read_rows(source: SourceTensor, rows: Box, out: RawArray, reader: Reader) -> None:
    """Fills `out` [*rows.extent] from the boxes that hold the rows."""
    for stored, shared in source.in_rows(rows):
        row_bytes = out.itemsize
        for size in stored.box.extent[1:]:
            row_bytes *= size
        begin = (shared.offset[0] - stored.box.offset[0]) * row_bytes
        part = out[shared.within(rows).slices()]
        if part.flags.c_contiguous:
            reader.read_box(stored, begin, as_bytes(part))
        else:
            beside = np.empty(part.shape, part.dtype)
            reader.read_box(stored, begin, as_bytes(beside))
            part[...] = beside


def as_bytes(array: RawArray) -> memoryview:
    """The bytes of an array: its own memory if they lie together, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def verify_files(plan: Plan, directory: Path, names: Collection[str], progress: Progress) -> None:
    """Reads everything back, source and target, and compares bit by bit.

    A file that is wrong is removed: by its size it would count as whole when the same conversion goes on.

    Raises:
        UserError: a source cannot be read.
        RuntimeError: tensors are not what they should be; each wrong file, and the first such tensor in it, is named.
    """
    reader = Reader()
    wrong: dict[str, str] = {}
    begins = {file.name: len(file.header()) for file in plan.files}
    offsets = {file.name: {key: entry["data_offsets"][0] for key, entry in file.entries.items()} for file in plan.files}
    try:
        for tensor in plan.tensors:
            done = dict.fromkeys((target.file for target in tensor.boxes), 0)
            for rows, array in tensor_rows(tensor, reader, [target.box for target in tensor.boxes]):
                for target in tensor.boxes:
                    shared = intersection(target.box, rows)
                    if shared is None or target.file not in names or target.file in wrong:
                        continue
                    expected = as_bytes(array[shared.within(rows).slices()])
                    begin = begins[target.file] + offsets[target.file][target.key] + done[target.file]
                    path = directory / target.file
                    if not _holds(reader, path, begin, expected):
                        wrong[target.file] = f"{path}: {target.key} is not what was written"
                    done[target.file] += len(expected)
                    progress.add(len(expected))
    finally:
        reader.close()
        for file in wrong:
            (directory / file).unlink()
    if wrong:
        raise RuntimeError("; ".join([*wrong.values(), "removed: the same command writes that anew"]))


def _holds(reader: Reader, path: Path, begin: int, expected: memoryview) -> bool:
    """Whether a file has these bytes from `begin` on, and can be read there."""
    found = memoryview(bytearray(len(expected)))
    try:
        reader.read_into(path, begin, found)
    except UserError:
        return False
    return found == expected


def first_difference(one: SourceTensor, other: SourceTensor) -> int | None:
    """The first rows (the index of the first of them) in which two tensors of one shape and type differ; None if none.

    Raises:
        UserError: one cannot be read.
    """
    reader = Reader()
    copied = (CopiedTensor(tensor.name, "weight", tensor, tensor.dtype, ()) for tensor in (one, other))
    try:
        pairs = zip(*(tensor_rows(tensor, reader, [one.whole]) for tensor in copied), strict=True)
        for (rows, left), (_, right) in pairs:
            if not np.array_equal(left, right):
                return rows.offset[0]
    finally:
        reader.close()
    return None
