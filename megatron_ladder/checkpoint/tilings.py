"""The tensors of a checkpoint in its manifest: which boxes tile each of them, and which rank wrote each box.

Tensors of one shape are usually distributed over the ranks alike. They share a tiling, the list of their boxes, so that
the manifest and the index of each rank do not grow with the number of layers. `manifest` describes the records.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.checkpoint.boxes import MAX_DIMENSIONS, Box, first_untiled
from megatron_ladder.checkpoint.tensor_file import BY_NAME

KINDS = {"weight": "weights", "exp_avg": "optimizer", "exp_avg_sq": "optimizer", "rng": "rng"}
"""Kind of tensor -> name of the files that hold it. A weight is stored as its fp32 master."""
_COLUMNS = ("name", "kind", "dtype", "tiling")


class FileRecord(TypedDict):
    """A file of the checkpoint: its name, its size in bytes, and its checksum as "algorithm:digits"."""

    name: str
    size: int
    checksum: str


def file_name(kind: str, rank: int) -> str:
    """Return the name of the file in which a rank writes tensors of a kind."""
    return f"{KINDS[kind]}_rank_{rank:05d}.safetensors"


def writer_of(name: str) -> int:
    """Return the rank that wrote a file, from the file name; 0 for files that no rank's writer wrote."""
    match = re.search(r"_rank_(\d{5,9})\.", name)
    return 0 if match is None else int(match[1])


def box_key(kind: str, name: str, box: Box) -> str:
    """Return the key of a box in its file."""
    return f"{kind}:{name}@{','.join(map(str, box.offset))}"


class BoxRecord(NamedTuple):
    """A stored box of a tensor, and the rank that writes it; `dtype` is the name in torch."""

    name: str
    kind: str
    global_shape: tuple[int, ...]
    box: Box
    dtype: str
    rank: int

    @property
    def file(self) -> str:
        """Return the name of the file that holds the box."""
        return file_name(self.kind, self.rank)

    @property
    def key(self) -> str:
        """Return the key of the box in its file."""
        return box_key(self.kind, self.name, self.box)


class _TilingRecord(TypedDict):
    global_shape: list[int]
    offsets: list[list[int]]
    extents: list[list[int]]
    writers: list[int]


class _TensorColumns(TypedDict):
    name: list[str]
    kind: list[str]
    dtype: list[str]
    tiling: list[int]


class FileIndex(TypedDict):
    """The files that one rank wrote, and the boxes in them as in a manifest; JSON-serialisable."""

    files: list[FileRecord]
    tilings: list[_TilingRecord]
    tensors: _TensorColumns


@dataclass(frozen=True, eq=False)
class _Tiling:
    """The boxes of a tensor: `offsets` and `extents` are [boxes, dimensions]; `writers` has a number per box."""

    global_shape: tuple[int, ...]
    offsets: NDArray[np.int64]
    extents: NDArray[np.int64]
    writers: NDArray[np.int64]


@dataclass(frozen=True)
class StoredTensor:
    """A canonical tensor on disk: the boxes that tile it, and the file and key of each.

    `dtype` is the name in torch, such as `bfloat16`.
    """

    name: str
    kind: str
    dtype: str
    _tiling: _Tiling
    _files: Mapping[int, str]
    """Writer -> file; shared by many tensors, like the tiling."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Return the shape of the canonical tensor."""
        return self._tiling.global_shape

    @property
    def num_boxes(self) -> int:
        """Return the number of boxes."""
        return len(self._tiling.writers)

    def box(self, index: int) -> Box:
        """Return one of the boxes."""
        return Box(tuple(self._tiling.offsets[index].tolist()), tuple(self._tiling.extents[index].tolist()))

    def file(self, index: int) -> str:
        """Return the name of the file that holds a box."""
        return self._files[int(self._tiling.writers[index])]

    def key(self, index: int) -> str:
        """Return the key of a box in its file."""
        return box_key(self.kind, self.name, self.box(index))

    def files(self) -> set[str]:
        """Return the names of the files that hold the boxes."""
        return {self._files[writer] for writer in np.unique(self._tiling.writers).tolist()}

    def boxes_in(self, files: Collection[str]) -> list[int]:
        """Return the indices of the boxes in some files."""
        chosen = [writer for writer in np.unique(self._tiling.writers).tolist() if self._files[writer] in files]
        return [int(index) for index in np.flatnonzero(np.isin(self._tiling.writers, chosen))] if chosen else []

    def overlapping(self, wanted: Box) -> list[int]:
        """Return the indices of the boxes that share elements with `wanted`."""
        low = np.array(wanted.offset, np.int64)
        high = low + np.array(wanted.extent, np.int64)
        shared = (self._tiling.offsets < high) & (self._tiling.offsets + self._tiling.extents > low)
        return [int(index) for index in np.flatnonzero(shared.all(axis=1))]


class _DistinctTilings:
    """A list in which equal tilings are one."""

    def __init__(self) -> None:
        self.records: list[_TilingRecord] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def add(self, record: _TilingRecord) -> int:
        """Return the index of a tiling."""
        columns = (record["global_shape"], *record["offsets"], *record["extents"], record["writers"])
        number = self._numbers.setdefault(tuple(map(tuple, columns)), len(self.records))
        if number == len(self.records):
            self.records.append(record)
        return number


def make_index(files: Sequence[FileRecord], boxes: Iterable[BoxRecord]) -> FileIndex:
    """Return the index of files and the boxes in them; raise ValueError as `merge_manifest`."""
    tensors: dict[tuple[str, str], list[BoxRecord]] = {}
    for box in boxes:
        tensors.setdefault((box.kind, box.name), []).append(box)
    tilings = _DistinctTilings()
    rows = []
    for (kind, name), found in tensors.items():
        _check_same(kind, name, [(box.global_shape, box.dtype) for box in found])
        record: _TilingRecord = {
            "global_shape": list(found[0].global_shape),
            "offsets": [list(column) for column in zip(*(one.box.offset for one in found), strict=True)],
            "extents": [list(column) for column in zip(*(one.box.extent for one in found), strict=True)],
            "writers": [one.rank for one in found],
        }
        rows.append((name, kind, found[0].dtype, tilings.add(record)))
    return {"files": list(files), "tilings": tilings.records, "tensors": _in_columns(rows)}


def merge_tensors(indices: Sequence[FileIndex]) -> tuple[list[_TilingRecord], _TensorColumns]:
    """Merge the tensors of all ranks; raise ValueError if the ranks disagree about a tensor."""
    parts = _DistinctTilings()
    tensors: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for index in indices:
        numbers, columns = [parts.add(record) for record in index["tilings"]], index["tensors"]
        for name, kind, dtype, tiling in zip(*columns.values(), strict=True):
            tensors.setdefault((kind, name), []).append((dtype, numbers[tiling]))
    merged: dict[tuple[int, ...], int] = {}
    tilings = _DistinctTilings()
    rows = []
    for kind, name in sorted(tensors):
        found = tensors[kind, name]
        chosen = tuple(number for _, number in found)
        if chosen not in merged or len({dtype for dtype, _ in found}) > 1:
            records = [parts.records[number] for number in chosen]
            shapes = [tuple(record["global_shape"]) for record in records]
            _check_same(kind, name, [(shape, dtype) for shape, (dtype, _) in zip(shapes, found, strict=True)])
            merged[chosen] = tilings.add(_joined(records))
        rows.append((name, kind, found[0][0], merged[chosen]))
    return tilings.records, _in_columns(rows)


def _in_columns(rows: Sequence[tuple[str, str, str, int]]) -> _TensorColumns:
    """Return names, kinds, dtypes and tilings of tensors as columns."""
    name, kind, dtype, tiling = ([row[i] for row in rows] for i in range(len(_COLUMNS)))
    return {"name": name, "kind": kind, "dtype": dtype, "tiling": tiling}  # type: ignore[typeddict-item]


def _check_same(kind: str, name: str, found: Sequence[tuple[tuple[int, ...], str]]) -> None:
    """Raise ValueError if the parts of a tensor do not have one shape and dtype."""
    if different := [one for one in found if one != found[0]]:
        shown = [f"{dtype} of shape {list(shape)}" for shape, dtype in (found[0], different[0])]
        raise ValueError(f"{kind} of {name} was written as {shown[0]} and as {shown[1]}")


def _joined(records: Sequence[_TilingRecord]) -> _TilingRecord:
    """Return the boxes of all records, sorted by offset."""
    if len(records) == 1:
        return records[0]
    offsets = np.concatenate([np.array(record["offsets"]) for record in records], axis=1)
    extents = np.concatenate([np.array(record["extents"]) for record in records], axis=1)
    writers = np.concatenate([np.array(record["writers"]) for record in records])
    order = np.lexsort((writers, *offsets[::-1]))
    return {
        "global_shape": records[0]["global_shape"],
        "offsets": offsets[:, order].tolist(),
        "extents": extents[:, order].tolist(),
        "writers": writers[order].tolist(),
    }


def expect(record: Any, where: str, key: str, kind: type) -> Any:
    """Return the value of a key; raise ValueError if it is missing or not of that type."""
    if not isinstance(record, dict) or key not in record:
        raise ValueError(f"{where} has no {key}")
    if type(record[key]) is not kind:
        raise ValueError(f"{key} of {where} is not of type {kind.__name__}")
    return record[key]


def tensors_in_columns(manifest: dict[str, Any], sizes: Mapping[str, int]) -> Iterator[StoredTensor]:
    """Yield the tensors of a manifest, or raise ValueError; `sizes` are those of its files."""
    records = expect(manifest, "the manifest", "tilings", list)
    columns = expect(manifest, "the manifest", "tensors", dict)
    lists = [expect(columns, "tensors", key, list) for key in _COLUMNS]
    if len({len(column) for column in lists}) > 1:
        raise ValueError("the columns of tensors do not have the same length")
    ranks = set(map(writer_of, sizes))
    files = {kind: {rank: name for rank in ranks if (name := file_name(kind, rank)) in sizes} for kind in KINDS}
    tilings: dict[int, _Tiling] = {}
    listed: set[tuple[str, int]] = set()
    for name, kind, dtype, number in zip(*lists, strict=True):
        what = _checked_name(name, kind, dtype)
        if type(number) is not int or not 0 <= number < len(records):
            raise ValueError(f"{what}: tiling {number!r} does not exist")
        if number not in tilings:
            record = records[number]
            shape = _checked_shape(record, what, sizes)
            boxes = len(expect(record, what, "writers", list))
            offsets, extents, writers = (
                _integers(expect(record, what, key, list), (*rows, boxes), f"{what}: {key}")
                for key, rows in (("offsets", (len(shape),)), ("extents", (len(shape),)), ("writers", ()))
            )
            tilings[number] = _checked_tiling(what, shape, offsets.T, extents.T, writers)
        if (kind, number) not in listed:
            for writer in np.unique(tilings[number].writers).tolist():
                if writer not in files[kind]:
                    raise ValueError(f"{what}: the file {file_name(kind, writer)!r} is not listed under files")
            listed.add((kind, number))
        yield StoredTensor(name, kind, dtype, tilings[number], files[kind])


def _checked_name(name: Any, kind: Any, dtype: Any) -> str:
    """Return how messages name a tensor."""
    if not all(isinstance(value, str) for value in (name, kind, dtype)) or kind not in KINDS or dtype not in BY_NAME:
        raise ValueError(f"{name}: unknown kind {kind!r} or dtype {dtype!r}")
    return f"{kind} of {name}"


def _integers(values: list[Any], shape: tuple[int, ...], what: str) -> NDArray[np.int64]:
    """Return lists of integers as an array of that shape."""
    try:
        found = np.array(values)
    except (ValueError, OverflowError):
        found = np.empty(())
    if 0 in shape and found.size == 0:
        return np.empty(shape, np.int64)
    if found.dtype != np.int64 or found.shape != shape:
        raise ValueError(f"{what}: expected {' x '.join(map(str, shape))} integers")
    return found


def _checked_shape(record: Any, what: str, sizes: Mapping[str, int]) -> list[int]:
    """Return the `global_shape` of a record; `sizes` are those of the files."""
    shape: list[Any] = expect(record, what, "global_shape", list)
    if not 1 <= len(shape) <= MAX_DIMENSIONS or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"{what}: invalid global_shape {shape}")
    if math.prod(shape) > sum(sizes.values()):
        raise ValueError(f"{what}: a tensor of shape {shape} does not fit in the files")
    return shape


def _checked_tiling(
    what: str, shape: list[int], offsets: NDArray[np.int64], extents: NDArray[np.int64], writers: NDArray[np.int64]
) -> _Tiling:
    limits = np.array(shape, np.int64)
    if np.any((offsets < 0) | (extents < 1) | (extents > limits) | (offsets > limits - extents)):
        raise ValueError(f"{what}: a box is not inside the tensor of shape {shape}")
    if (untiled := first_untiled(shape, offsets, extents)) is not None:
        index, repeated = untiled
        held = "more than one box holds" if repeated else "no box holds"
        raise ValueError(f"{what} of shape {shape}: {held} the element {list(index)}")
    return _Tiling(tuple(shape), offsets, extents, writers)
