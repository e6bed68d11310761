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
from itertools import product
from operator import attrgetter
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType
from numpy.typing import NDArray

from megatron_ladder.checkpoint.checksum import checksum_of
from megatron_ladder.checkpoint.tensor_file import ELEMENT_BYTES, StoredTensor
from megatron_ladder.config.training import OptimizerConfig

FORMAT_NAME = "megatron_ladder checkpoint"
SCHEMA_VERSION = 3
KINDS = {"weight": "weights", "exp_avg": "optimizer", "exp_avg_sq": "optimizer", "rng": "rng"}
"""Kind of tensor -> name of the files that hold it. A weight is stored as its fp32 master."""
_RESERVED_KEYS = ("format", "schema_version", "files", "tilings", "tensors", "manifest_checksum")
_CHECKSUM_LINE = re.compile(rb',\n "manifest_checksum": "(xxh3_128:[0-9a-f]+)"\n}\n\Z')
_CHECKSUM_LINE_BYTES = 128

_Steps = Annotated[int, Meta(ge=0, lt=10**15)]
"""Iterations and samples: the names of directories have up to 15 digits."""
_Count = Annotated[int, Meta(ge=0, lt=2**48)]
_Size = Annotated[int, Meta(ge=1, lt=2**48)]


class FileRecord(Struct, frozen=True):
    """A file of the checkpoint: its name, its size in bytes, and its checksum."""

    name: str
    size: _Count
    checksum: Annotated[str, Meta(pattern="^xxh3_128:[0-9a-f]{32}$")]


class BoxRecord(Struct, frozen=True, array_like=True):
    """A box of a tensor, and the rank that wrote it."""

    offset: tuple[_Count, ...]
    extent: tuple[_Size, ...]
    writer: _Count


class Tiling(Struct, frozen=True):
    """The boxes of a tensor, or the part of them that one rank wrote."""

    shape: Annotated[tuple[_Size, ...], Meta(min_length=1, max_length=8)]
    """At most eight dimensions: a check visits the 2**n corners of each n-dimensional box."""
    boxes: tuple[BoxRecord, ...]


class TensorRecord(Struct, frozen=True, array_like=True):
    """A tensor: its name, kind and dtype, and the index of its tiling."""

    name: str
    kind: Literal["weight", "exp_avg", "exp_avg_sq", "rng"]
    dtype: Literal["float32", "bfloat16", "float16", "float64", "uint8", "int64"]
    tiling: _Count


class Index(Struct, frozen=True):
    """The files that one rank wrote, or all ranks, and the tensors in them."""

    files: list[FileRecord]
    tilings: list[Tiling]
    tensors: list[TensorRecord]


class _Manifest(Index, frozen=True):
    iteration: _Steps
    consumed_samples: _Steps
    model: dict[str, Any]


def _optional(**types: Any) -> Any:
    """Return the type of an object with optional keys of these types, and any others."""
    return msgspec.defstruct("Optional", [(name, kind | UnsetType, UNSET) for name, kind in types.items()])


_OtherKeys = _optional(
    run=_optional(
        training=_optional(train_iters=int, seed=int, seq_length=int),
        optimizer=_optional(**get_type_hints(OptimizerConfig)),
        parallel=dict,
    ),
    data=_optional(stream=_optional(streams=int)),
    tokenizer=_optional(type=str, sha256=str) | None,
    hugging_face=dict,
    guard=_optional(bad_in_a_row=int, losses=list[float]),
    optimizer=_optional(steps_taken=int),
    data_streams=list[dict[str, Any]],
    versions=dict,
)
"""Other keys that programs read. A converted model has few of them."""

TensorTable = dict[str, dict[str, StoredTensor]]
"""kind -> name -> tensor"""


def file_name(kind: str, rank: int) -> str:
    """Return the name of the file in which a rank writes tensors of a kind."""
    return f"{KINDS[kind]}_rank_{rank:05d}.safetensors"


def writer_of(name: str) -> int:
    """Return the rank that wrote a file, from the file name; 0 for files that no rank's writer wrote."""
    match = re.search(r"_rank_(\d{5,9})\.", name)
    return 0 if match is None else int(match[1])


def is_plain_name(name: str) -> bool:
    """Return whether a file name stays inside the directory that it is joined to, and is not hidden."""
    return re.fullmatch(r"[^./\\\0][^/\\\0]*", name) is not None


def make_index(files: Iterable[FileRecord], tensors: Mapping[tuple[str, str], tuple[str, Tiling]]) -> Index:
    """Return the index of files and the tensors in them, (kind, name) -> (dtype, tiling). Equal tilings become one."""
    numbers: dict[Tiling, int] = {}
    records = [
        TensorRecord(name, kind, dtype, numbers.setdefault(tiling, len(numbers)))  # type: ignore[arg-type]
        for (kind, name), (dtype, tiling) in tensors.items()
    ]
    return Index(sorted(files, key=attrgetter("name")), list(numbers), records)


def merge_manifest(header: Mapping[str, Any], indices: Sequence[Index]) -> dict[str, Any]:
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
    files = [file for index in indices for file in index.files]
    index: Any = msgspec.to_builtins(make_index(files, _merged_tensors(indices)))
    manifest = {"format": FORMAT_NAME, "schema_version": SCHEMA_VERSION, **header, **index}
    _check_manifest(manifest)
    return manifest


def _merged_tensors(indices: Sequence[Index]) -> dict[tuple[str, str], tuple[str, Tiling]]:
    parts: dict[Tiling, int] = {}
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for index in indices:
        numbers = [parts.setdefault(tiling, len(parts)) for tiling in index.tilings]
        for record in index.tensors:
            found.setdefault((record.kind, record.name), []).append((record.dtype, numbers[record.tiling]))
    distinct, merged = list(parts), dict[tuple[tuple[str, int], ...], tuple[str, Tiling]]()
    for (kind, name), of_ranks in found.items():
        chosen = tuple(of_ranks)
        if chosen not in merged:
            tilings = [distinct[number] for _, number in chosen]
            written = [
                f"{dtype} of shape {list(tiling.shape)}" for (dtype, _), tiling in zip(chosen, tilings, strict=True)
            ]
            if different := [text for text in written if text != written[0]]:
                raise ValueError(f"{kind} of {name} was written as {written[0]} and as {different[0]}")
            boxes = sorted((box for tiling in tilings for box in tiling.boxes), key=attrgetter("offset", "writer"))
            merged[chosen] = chosen[0][0], Tiling(tilings[0].shape, tuple(boxes))
    return {key: merged[tuple(found[key])] for key in sorted(found)}


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


def parse_json(data: bytes) -> Any:
    """Parse JSON of untrusted origin; raise ValueError if it is invalid, too deep, or has NaN or infinity."""
    try:
        return msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def decode_manifest(data: bytes) -> tuple[dict[str, Any], TensorTable]:
    """Parse `manifest.json` without trusting it: check that it is complete, unaltered, known and consistent.

    Returns:
        The manifest without tensors, tilings and its checksum, and the table of tensors.

    Raises:
        ValueError: the manifest is invalid.
    """
    manifest_checksum(data)
    manifest = parse_json(data)
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
    found = checksum_of(data[: line.start()])
    if found != expected:
        raise ValueError(f"damaged: its last line records {expected}, its contents have {found}")
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
    try:
        manifest = msgspec.convert(values, _Manifest)
        msgspec.convert(values, _OtherKeys)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    sizes: dict[str, int] = {}
    for record in manifest.files:
        if not is_plain_name(record.name):
            raise ValueError(f"the file name {record.name!r} is not a plain file name")
        if record.name in sizes:
            raise ValueError(f"the file {record.name} is listed twice")
        sizes[record.name] = record.size
    ranks, total_bytes = set(map(writer_of, sizes)), sum(sizes.values())
    files = {kind: {rank: name for rank in ranks if (name := file_name(kind, rank)) in sizes} for kind in KINDS}
    table: TensorTable = {kind: {} for kind in KINDS}
    arrays: dict[int, tuple[NDArray[np.int64], ...]] = {}
    for tensor in manifest.tensors:
        what, of_kind = f"{tensor.kind} of {tensor.name}", files[tensor.kind]
        if tensor.tiling >= len(manifest.tilings):
            raise ValueError(f"{what}: tiling {tensor.tiling} does not exist")
        if tensor.name in table[tensor.kind]:
            raise ValueError(f"{what} is listed twice")
        tiling = manifest.tilings[tensor.tiling]
        if math.prod(tiling.shape) * ELEMENT_BYTES[tensor.dtype] > total_bytes:
            raise ValueError(f"{what}: a tensor of shape {list(tiling.shape)} does not fit in the files")
        if tensor.tiling not in arrays:
            arrays[tensor.tiling] = _checked_boxes(what, tiling)
        offsets, extents, writers = arrays[tensor.tiling]
        for writer in {box.writer for box in tiling.boxes} - of_kind.keys():
            raise ValueError(f"{what}: the file {file_name(tensor.kind, writer)!r} is not listed under files")
        stored = StoredTensor(tensor.name, tensor.kind, tensor.dtype, tiling.shape, offsets, extents, writers, of_kind)
        table[tensor.kind][tensor.name] = stored
    return table


def _checked_boxes(what: str, tiling: Tiling) -> tuple[NDArray[np.int64], ...]:
    """Return offsets, extents and writers of the boxes of a tensor; raise ValueError if they do not tile it.

    A set of boxes, with multiplicity, is determined by its mixed difference: +1 or -1 at each corner of each box. So
    the boxes tile the tensor exactly if their signed corners cancel to the corners of the tensor itself; sorting them
    takes n log n steps for n boxes. At the smallest corner that does not cancel, the remainder is the number of boxes
    there minus one.
    """
    shape = (len(tiling.boxes), len(tiling.shape))
    if any(len(numbers) != shape[1] for box in tiling.boxes for numbers in (box.offset, box.extent)):
        raise ValueError(f"{what}: a box does not have {shape[1]} dimensions")
    offsets = np.array([box.offset for box in tiling.boxes], np.int64).reshape(shape)
    extents = np.array([box.extent for box in tiling.boxes], np.int64).reshape(shape)
    whole = np.array([tiling.shape], np.int64)
    if np.any(offsets + extents > whole):
        raise ValueError(f"{what}: a box is not inside the tensor of shape {list(tiling.shape)}")
    weights = np.append(np.ones(len(offsets), np.int64), -1)
    begins, sizes = np.concatenate([offsets, np.zeros_like(whole)]), np.concatenate([extents, whole])
    choices = list(product((0, 1), repeat=shape[1]))
    corners = np.concatenate([begins + sizes * np.array(choice, np.int64) for choice in choices])
    signs = np.concatenate([weights * (-1) ** sum(choice) for choice in choices])
    order = np.lexsort(corners.T[::-1])
    corners, signs = corners[order], signs[order]
    starts = np.flatnonzero(np.concatenate([[True], np.any(corners[1:] != corners[:-1], axis=1)]))
    remainders = np.add.reduceat(signs, starts)
    if len(wrong := np.flatnonzero(remainders)):
        held = "more than one box holds" if remainders[wrong[0]] > 0 else "no box holds"
        index = corners[starts[wrong[0]]].tolist()
        raise ValueError(f"{what} of shape {list(tiling.shape)}: {held} the element {index}")
    return offsets, extents, np.array([box.writer for box in tiling.boxes], np.int64)
