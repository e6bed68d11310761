"""The manifest of a checkpoint: its contents, how the parts of the ranks are merged, and how it is read.

`manifest.json` is one JSON object, with one line per key, file, tiling and tensor:

    format             "megatron_ladder checkpoint"
    schema_version     3
    iteration          completed optimizer steps
    consumed_samples   training samples seen
    model              sizes and wiring of the model (`ModelConfig.to_dict`)
    ...                other keys of the writer's header: training, optimizer (step and hyper-parameters), schedule,
                       rng (names of its tensors), tokenizer or null, layout and package versions of the writer; the
                       last two for information only
    files              [{"name", "size", "checksum"}], names without a directory; the tokenizer's files too
    tilings            [{"shape", "boxes": [[offset, extent, rank that wrote it]]}]: the boxes of one or more tensors
    tensors            [[name, kind, dtype, index of its tiling]]
    manifest_checksum  checksum of all bytes before the comma that precedes this line

The boxes of a tensor tile it: every element is in exactly one box. `file_name` and `box_key` give the file of a box and
its key there. Apart from the tilings, nothing in the manifest depends on how the tensors were distributed over ranks.

Tensors of one shape are usually distributed alike, so that there are few tilings, however many layers there are.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from megatron_ladder.blueprint.optimizers import MOMENTS
from megatron_ladder.checkpoint.tensor_file import StoredTensor, checksum_of
from megatron_ladder.typed import read_json, typed

FORMAT_NAME = "megatron_ladder checkpoint"
SCHEMA_VERSION = 3
KINDS = {"weight": "weights", **dict.fromkeys(MOMENTS, "optimizer"), "rng": "rng"}
"""Kind of tensor -> name of the files that hold it. A weight is stored as its fp32 master."""
_CHECKSUM_LINE = re.compile(rb',\n "manifest_checksum": "(xxh3_128:[0-9a-f]+)"\n}\n\Z')
_CHECKSUM_LINE_BYTES = 128


class FileRecord(Struct, frozen=True):
    """A file of the checkpoint: its name, its size in bytes, and its checksum."""

    name: str
    size: int
    checksum: str


class BoxRecord(Struct, frozen=True, array_like=True):
    """A box of a tensor, and the rank that wrote it."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    writer: int


class Tiling(Struct, frozen=True):
    """The boxes of a tensor, or the part of them that one rank wrote."""

    shape: tuple[int, ...]
    boxes: tuple[BoxRecord, ...]


class TensorRecord(Struct, frozen=True, array_like=True):
    """A tensor: its name, kind and dtype, and the index of its tiling."""

    name: str
    kind: str
    dtype: str
    tiling: int


class Index(Struct, frozen=True):
    """The files that one rank wrote, or all ranks, and the tensors in them."""

    files: list[FileRecord]
    tilings: list[Tiling]
    tensors: list[TensorRecord]


class _Manifest(Index, frozen=True):
    iteration: int
    consumed_samples: int
    model: dict[str, Any]
    # A converted model has few of these keys.
    run: dict[str, Any] = {}
    data: dict[str, Any] = {}
    tokenizer: dict[str, Any] | None = None
    hugging_face: dict[str, Any] = {}
    guard: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    data_streams: list[dict[str, Any]] = []
    versions: dict[str, Any] = {}


TensorTable = dict[str, dict[str, StoredTensor]]
"""kind -> name -> tensor"""
_Boxes = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def file_name(kind: str, rank: int) -> str:
    """Return the name of the file in which a rank writes tensors of a kind."""
    return f"{KINDS[kind]}_rank_{rank:05d}.safetensors"


def writer_of(name: str) -> int:
    """Return the rank that wrote a file, from the file name; 0 for files that no rank's writer wrote."""
    match = re.search(r"_rank_(\d{5,9})\.", name)
    return 0 if match is None else int(match[1])


def make_index(files: Iterable[FileRecord], tensors: Mapping[tuple[str, str], tuple[str, Tiling]]) -> Index:
    """Return the index of files and the tensors in them, (kind, name) -> (dtype, tiling). Equal tilings become one."""
    numbers: dict[Tiling, int] = {}
    records = [
        TensorRecord(name, kind, dtype, numbers.setdefault(tiling, len(numbers)))
        for (kind, name), (dtype, tiling) in tensors.items()
    ]
    return Index(sorted(files, key=attrgetter("name")), list(numbers), records)


def merge_manifest(header: Mapping[str, Any], indices: Sequence[Index]) -> dict[str, Any]:
    """Merge the indices of all ranks, in any order, into the manifest of their checkpoint.

    The header has `iteration`, `consumed_samples`, `model` and any other JSON-serialisable keys. Raises ValueError for
    a bug of the writer: the boxes of a tensor leave a hole, overlap, or disagree about its shape or dtype.
    """
    files = [file for index in indices for file in index.files]
    index: Any = msgspec.to_builtins(make_index(files, _merged_tensors(indices)))
    manifest = {"format": FORMAT_NAME, "schema_version": SCHEMA_VERSION, **header, **index}
    _check_manifest(manifest)
    return manifest


def _merged_tensors(indices: Sequence[Index]) -> dict[tuple[str, str], tuple[str, Tiling]]:
    # The numbers of different parts of tilings, and for each tensor the dtype and the part of each rank.
    numbers: dict[Tiling, int] = {}
    parts: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for index in indices:
        of_index = [numbers.setdefault(tiling, len(numbers)) for tiling in index.tilings]
        for record in index.tensors:
            parts.setdefault((record.kind, record.name), []).append((record.dtype, of_index[record.tiling]))
    # Tensors with the same parts share their tiling.
    distinct = list(numbers)
    merged = dict[tuple[tuple[str, int], ...], tuple[str, Tiling]]()
    for (kind, name), of_ranks in parts.items():
        key = tuple(of_ranks)
        if key in merged:
            continue
        tilings = [distinct[number] for _, number in of_ranks]
        if len({dtype for dtype, _ in of_ranks}) > 1 or len({tiling.shape for tiling in tilings}) > 1:
            raise ValueError(f"{kind} of {name}: ranks wrote it with several shapes or dtypes")
        boxes = sorted((box for tiling in tilings for box in tiling.boxes), key=attrgetter("offset", "writer"))
        merged[key] = of_ranks[0][0], Tiling(tilings[0].shape, tuple(boxes))
    return {key: merged[tuple(parts[key])] for key in sorted(parts)}


def encode_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of `manifest.json`, including its checksum; the values must be JSON-serialisable."""
    lines = []
    for key, value in manifest.items():
        if key in ("files", "tilings", "tensors"):
            rows = ",\n".join(f"  {json.dumps(row, allow_nan=False, separators=(',', ':'))}" for row in value)
            lines.append(f' "{key}": [\n{rows}\n ]')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f',\n "manifest_checksum": "{checksum_of(body)}"\n}}\n'.encode()


def decode_manifest(data: bytes) -> tuple[dict[str, Any], TensorTable]:
    """Return `manifest.json` without tensors, tilings and its checksum, and the table of tensors.

    Raises ValueError if the manifest is incomplete, altered, of another version or inconsistent.
    """
    manifest_checksum(data)
    manifest = read_json(data)
    table = _check_manifest(manifest)
    for key in ("tensors", "tilings", "manifest_checksum"):
        manifest.pop(key, None)
    return manifest, table


def manifest_checksum(data: bytes) -> str:
    """Return the checksum that a manifest records of itself; raise ValueError if it has none or is damaged."""
    line = _CHECKSUM_LINE.search(data, max(0, len(data) - _CHECKSUM_LINE_BYTES))
    if line is None:
        raise ValueError("does not end with its checksum: it is truncated, or not the manifest of a checkpoint")
    expected = line[1].decode()
    checksum = checksum_of(data[: line.start()])
    if checksum != expected:
        raise ValueError(f"damaged: its last line records {expected}, its contents have {checksum}")
    return expected


def _check_manifest(values: Any) -> TensorTable:
    """Check everything that can be checked without the data files, and return the tensors."""
    if not isinstance(values, dict) or values.get("format") != FORMAT_NAME:
        raise ValueError(f"is not an object with the format {FORMAT_NAME!r}")
    if (version := values.get("schema_version")) != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version is {version!r:.60}, and this program reads {SCHEMA_VERSION}: use the version of "
            "megatron_ladder that wrote the checkpoint"
        )
    manifest = typed(values, _Manifest)
    names = {record.name for record in manifest.files}
    if strange := [name for name in names if re.fullmatch(r"[^./\\\0][^/\\\0]*", name) is None]:
        raise ValueError(f"the file name {strange[0]!r} is not a plain file name")
    ranks = set(map(writer_of, names))
    files = {kind: {rank: file_name(kind, rank) for rank in ranks if file_name(kind, rank) in names} for kind in KINDS}
    table: TensorTable = {kind: {} for kind in KINDS}
    arrays: dict[int, _Boxes] = {}
    for tensor in manifest.tensors:
        tiling = manifest.tilings[tensor.tiling]
        if tensor.tiling not in arrays:
            arrays[tensor.tiling] = _checked_boxes(f"{tensor.kind} of {tensor.name}", tiling)
        table[tensor.kind][tensor.name] = StoredTensor(
            tensor.name, tensor.kind, tensor.dtype, tiling.shape, *arrays[tensor.tiling], files[tensor.kind]
        )
    return table


def _checked_boxes(what: str, tiling: Tiling) -> _Boxes:
    """Return offsets, extents and writers of the boxes of a tensor; raise ValueError if they cannot tile it."""
    shape = (len(tiling.boxes), len(tiling.shape))
    offsets = np.array([box.offset for box in tiling.boxes], np.int64).reshape(shape)
    extents = np.array([box.extent for box in tiling.boxes], np.int64).reshape(shape)
    if np.any(offsets + extents > tiling.shape):
        raise ValueError(f"{what}: a box is not inside the tensor of shape {list(tiling.shape)}")
    held = int(extents.prod(axis=1).sum())
    elements = math.prod(tiling.shape)
    if held != elements or len(np.unique(offsets, axis=0)) != len(offsets):
        raise ValueError(f"{what} of shape {list(tiling.shape)}: its boxes hold {held} elements, expected {elements}")
    return offsets, extents, np.array([box.writer for box in tiling.boxes], np.int64)
