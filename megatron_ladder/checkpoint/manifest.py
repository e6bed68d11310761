"""The manifest of a checkpoint: its contents, how the parts of the ranks are merged, and how it is read.

`manifest.json` is one JSON object, with one line per key and per tensor:

    format             "megatron_ladder checkpoint"
    schema_version     1
    iteration          completed optimizer steps
    consumed_samples   training samples seen
    model              sizes and wiring of the model (`ModelConfig.to_dict`)
    lineage            the branch of the checkpoint and its parent (`lineage`); absent in earlier versions
    ...                other keys of the writer's header: training, optimizer (step and hyper-parameters), schedule,
                       rng (names of its tensors), tokenizer or null, layout and package versions of the writer; the
                       last two for information only
    files              [{"name", "size", "checksum"}], names without a directory; the tokenizer's files too
    tensors            [{"name", "kind", "global_shape", "dtype", "boxes"}]
                       boxes: [{"offset", "extent", "file", "key"}]
    manifest_checksum  checksum of all bytes before the comma that precedes this line

The boxes of a tensor tile it: every element is in exactly one box. Apart from the boxes, nothing in the manifest
depends on how the tensors were distributed over ranks.
"""

import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.checkpoint.boxes import MAX_DIMENSIONS, Box, first_untiled
from megatron_ladder.checkpoint.checksum import DEFAULT_CHECKSUM, algorithm_of, checksum_of
from megatron_ladder.checkpoint.lineage import Lineage
from megatron_ladder.checkpoint.tensor_file import BY_NAME, parse_json
from megatron_ladder.config.training import OptimizerConfig
from megatron_ladder.flags import ValueType

FORMAT_NAME = "megatron_ladder checkpoint"
SCHEMA_VERSION = 1
KINDS = {"weight": "weights", "exp_avg": "optimizer", "exp_avg_sq": "optimizer", "rng": "rng"}
"""Kind of tensor -> name of the files that hold it. A weight is stored as its fp32 master."""
_MOST_STEPS = 10**15
"""Upper limit of iterations and samples: the names of directories have up to 15 digits."""
_OTHER_KEYS: dict[str, Any] = {
    "run": {
        "training": {"train_iters": (int,), "seed": (int,), "seq_length": (int,)},
        "optimizer": {
            field.name: (kind.scalar, *((int,) * (kind.scalar is float)), *((type(None),) * kind.optional))
            for field in fields(OptimizerConfig)
            for kind in (ValueType.of(field.type),)
        },
        "parallel": {},
    },
    "data": {"stream": {"streams": (int,)}},
    "tokenizer": {"type": (str,), "sha256": (str,)},
    "hugging_face": {},
    "guard": {"bad_in_a_row": (int,), "losses": [(int, float)]},
    "optimizer": {"steps_taken": (int,), "loss_scaler": {}},
    "data_streams": [{}],
    "versions": {},
}
"""Optional keys and their types: of a value, of some keys of an object, or of all items of a list."""
_RESERVED_KEYS = ("format", "schema_version", "files", "tensors", "manifest_checksum")
_CHECKSUM_LINE = re.compile(rb',\n "manifest_checksum": "([0-9a-z_]+:[0-9a-f]+)"\n}\n\Z')
_CHECKSUM_LINE_BYTES = 128
_LINEAGE_LINE = b' "lineage": '
_END_OF_HEADER = b' "files": '


class FileRecord(TypedDict):
    """A file of the checkpoint: its name, its size in bytes, and its checksum as "algorithm:digits"."""

    name: str
    size: int
    checksum: str


class BoxRecord(TypedDict):
    """A stored box of a tensor, and the file and key that hold it."""

    name: str
    kind: str
    global_shape: list[int]
    offset: list[int]
    extent: list[int]
    dtype: str
    file: str
    key: str


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


def box_record(name: str, kind: str, global_shape: Sequence[int], box: Box, dtype: str, rank: int) -> BoxRecord:
    """Describe a box that a rank writes; `dtype` is the name in torch."""
    file, key = file_name(kind, rank), box_key(kind, name, box)
    return {
        "name": name, "kind": kind, "global_shape": list(global_shape), "offset": list(box.offset),
        "extent": list(box.extent), "dtype": dtype, "file": file, "key": key,
    }  # fmt: skip


class FileIndex(TypedDict):
    """The files that one rank wrote and the boxes in them; JSON-serialisable."""

    files: list[FileRecord]
    boxes: list[BoxRecord]


@dataclass(frozen=True)
class StoredTensor:
    """A canonical tensor on disk: the boxes that tile it, and the file and key of each.

    `dtype` is the name in torch, such as `bfloat16`; `offsets` and `extents` are [boxes, dimensions].
    """

    name: str
    kind: str
    global_shape: tuple[int, ...]
    dtype: str
    offsets: NDArray[np.int64]
    extents: NDArray[np.int64]
    files: list[str]
    keys: list[str]

    def box(self, index: int) -> Box:
        """Return one of the boxes."""
        return Box(tuple(self.offsets[index].tolist()), tuple(self.extents[index].tolist()))

    def overlapping(self, wanted: Box) -> list[int]:
        """Return the indices of the boxes that share elements with `wanted`."""
        low = np.array(wanted.offset, np.int64)
        high = low + np.array(wanted.extent, np.int64)
        shared = (self.offsets < high) & (self.offsets + self.extents > low)
        return [int(index) for index in np.flatnonzero(shared.all(axis=1))]


TensorTable = dict[str, dict[str, StoredTensor]]
"""kind -> name -> tensor"""


def merge_manifest(header: Mapping[str, Any], indices: Sequence[FileIndex]) -> dict[str, Any]:
    """Merge the indices of all ranks into the manifest of their checkpoint.

    Args:
        header: `iteration`, `consumed_samples`, `model` and any other JSON-serialisable keys.
        indices: one per rank, in any order.

    Raises:
        ValueError: a bug of the writer: the boxes of a tensor leave a hole, overlap, or disagree about its shape or
            dtype; a file was written twice; the header lacks a key or has a reserved one.
    """
    if reserved := [key for key in _RESERVED_KEYS if key in header]:
        raise ValueError(f"the header of a manifest must not have the keys {', '.join(reserved)}")
    tensors: dict[tuple[str, str], dict[str, Any]] = {}
    for index in indices:
        for box in index["boxes"]:
            common = {"global_shape": box["global_shape"], "dtype": box["dtype"]}
            identity = {"name": box["name"], "kind": box["kind"]}
            tensor = tensors.setdefault((box["kind"], box["name"]), {**identity, **common, "boxes": []})
            if any(tensor[key] != value for key, value in common.items()):
                found = {key: tensor[key] for key in common}
                raise ValueError(f"{box['kind']} of {box['name']} was written as {found} and as {common}")
            tensor["boxes"].append({key: box[key] for key in ("offset", "extent", "file", "key")})
    manifest = {
        "format": FORMAT_NAME,
        "schema_version": SCHEMA_VERSION,
        **header,
        "files": sorted((file for index in indices for file in index["files"]), key=itemgetter("name")),
        "tensors": [tensors[identity] for identity in sorted(tensors)],
    }
    _check_manifest(manifest)
    return manifest


def encode_manifest(manifest: Mapping[str, Any], algorithm: str = DEFAULT_CHECKSUM) -> bytes:
    """Return the bytes of `manifest.json`, including its checksum; the values must be JSON-serialisable."""
    lines = []
    for key, value in manifest.items():
        if key == "tensors":
            rows = ",\n".join(f"  {json.dumps(tensor, allow_nan=False)}" for tensor in value)
            lines.append(f' "tensors": [\n{rows}\n ]')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f',\n "manifest_checksum": "{checksum_of(body, algorithm)}"\n}}\n'.encode()


def decode_manifest(data: bytes) -> tuple[dict[str, Any], TensorTable]:
    """Parse `manifest.json` without trusting it: check that it is complete, unaltered, known and consistent.

    Returns:
        The manifest without `tensors` and its checksum, and the table of tensors.

    Raises:
        ValueError: the manifest is invalid.
    """
    manifest_checksum(data)
    manifest = parse_json(data.decode())
    table = _check_manifest(manifest)
    del manifest["tensors"], manifest["manifest_checksum"]
    return manifest, table


def manifest_checksum(data: bytes) -> str:
    """Return the checksum that a manifest records of itself; raise ValueError if it has none or is damaged."""
    line = _CHECKSUM_LINE.search(data, max(0, len(data) - _CHECKSUM_LINE_BYTES))
    if line is None:
        raise ValueError("does not end with its checksum: it is truncated, or not the manifest of a checkpoint")
    expected = line[1].decode()
    found = checksum_of(data[: line.start()], algorithm_of(expected))
    if found != expected:
        raise ValueError(f"damaged: its last line records {expected}, its contents have {found}")
    return expected


def read_lineage(path: Path) -> Lineage | None:
    """Return the lineage in a manifest, of which only the first lines are read; None if they are not readable."""
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.startswith(_LINEAGE_LINE):
                    return Lineage.from_record(parse_json(line[len(_LINEAGE_LINE) :].decode().rstrip(",\n")))
                if line.startswith(_END_OF_HEADER):
                    return Lineage()
    except (OSError, ValueError):
        pass
    return None


def _check_manifest(manifest: Any) -> TensorTable:
    """Check everything that can be checked without the data files, and return the tensors."""
    where = "the manifest"
    if (name := _expect(manifest, where, "format", str)) != FORMAT_NAME:
        raise ValueError(f"format is {name!r}, expected {FORMAT_NAME!r}")
    if (version := _expect(manifest, where, "schema_version", int)) != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {version}, and this program reads {SCHEMA_VERSION}")
    for key in ("iteration", "consumed_samples"):
        if not 0 <= (count := _expect(manifest, where, key, int)) < _MOST_STEPS:
            raise ValueError(f"{key} is {count}, expected 0 to {_MOST_STEPS - 1}")
    _expect(manifest, where, "model", dict)
    for key in _OTHER_KEYS.keys() & manifest.keys():
        if key != "tokenizer" or manifest[key] is not None:
            _check_types(manifest[key], key, _OTHER_KEYS[key])
    if "lineage" in manifest:
        Lineage.from_record(manifest["lineage"])
    sizes: dict[str, int] = {}
    for record in _expect(manifest, where, "files", list):
        name = _expect(record, "an entry of files", "name", str)
        if not is_plain_name(name):
            raise ValueError(f"the file name {name!r} is not a plain file name")
        if name in sizes:
            raise ValueError(f"the file {name} is listed twice")
        algorithm_of(_expect(record, name, "checksum", str))
        sizes[name] = _expect(record, name, "size", int)
    total_bytes = sum(sizes.values())
    table: TensorTable = {kind: {} for kind in KINDS}
    for record in _expect(manifest, where, "tensors", list):
        tensor = _stored_tensor(record, sizes, total_bytes)
        if tensor.name in table[tensor.kind]:
            raise ValueError(f"{tensor.kind} of {tensor.name} is listed twice")
        table[tensor.kind][tensor.name] = tensor
    return table


def _check_types(value: Any, name: str, expected: Any) -> None:
    """Raise ValueError if a value is not of the expected types, see `_OTHER_KEYS`."""
    kinds = expected if isinstance(expected, tuple) else (type(expected),)
    if type(value) not in kinds:
        raise ValueError(f"{name} is {value!r:.60}, expected {' or '.join(kind.__name__ for kind in kinds)}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_types(item, f"{name}.{index}", expected[0])
    elif isinstance(value, dict):
        for key in value.keys() & expected.keys():
            _check_types(value[key], f"{name}.{key}", expected[key])


def is_plain_name(name: str) -> bool:
    """Return whether a file name stays inside the directory that it is joined to, and is not hidden."""
    return re.fullmatch(r"[^./\\\0][^/\\\0]*", name) is not None


def _expect(record: Any, where: str, key: str, kind: type) -> Any:
    if not isinstance(record, dict) or key not in record:
        raise ValueError(f"{where} has no {key}")
    if type(record[key]) is not kind:
        raise ValueError(f"{key} of {where} is not of type {kind.__name__}")
    return record[key]


def _stored_tensor(record: Any, files: Collection[str], total_bytes: int) -> StoredTensor:
    name, kind, dtype_name = (_expect(record, "a tensor", key, str) for key in ("name", "kind", "dtype"))
    if kind not in KINDS or dtype_name not in BY_NAME:
        raise ValueError(f"{name}: unknown kind {kind!r} or dtype {dtype_name!r}")
    what = f"{kind} of {name}"
    shape = _expect(record, what, "global_shape", list)
    if not 1 <= len(shape) <= MAX_DIMENSIONS or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"{what}: invalid global_shape {shape}")
    if math.prod(shape) * BY_NAME[dtype_name].size > total_bytes:
        raise ValueError(f"{what}: a tensor of shape {shape} does not fit in the files")
    boxes = _expect(record, what, "boxes", list)
    for box in boxes:
        if _expect(box, f"a box of {what}", "file", str) not in files:
            raise ValueError(f"{what}: the file {box['file']!r} is not listed under files")
        _expect(box, f"a box of {what}", "key", str)
    offsets, extents = (_coordinates(boxes, key, what, len(shape)) for key in ("offset", "extent"))
    limits = np.array(shape, np.int64)
    if np.any((offsets < 0) | (extents < 1) | (extents > limits) | (offsets > limits - extents)):
        raise ValueError(f"{what}: a box is not inside the tensor of shape {shape}")
    if (untiled := first_untiled(shape, offsets, extents)) is not None:
        index, repeated = untiled
        held = "more than one box holds" if repeated else "no box holds"
        raise ValueError(f"{what} of shape {shape}: {held} the element {list(index)}")
    box_files, box_keys = [sys.intern(box["file"]) for box in boxes], [box["key"] for box in boxes]
    return StoredTensor(name, kind, tuple(shape), dtype_name, offsets, extents, box_files, box_keys)


def _coordinates(boxes: Iterable[Any], key: str, what: str, dimensions: int) -> NDArray[np.int64]:
    rows = [_expect(box, f"a box of {what}", key, list) for box in boxes]
    if not rows:
        return np.empty((0, dimensions), np.int64)
    try:
        found = np.array(rows)
    except (ValueError, OverflowError):
        found = np.empty(0)
    if found.dtype != np.int64 or found.shape != (len(rows), dimensions):
        raise ValueError(f"{what}: the {key} of a box does not have {dimensions} integers")
    return found
