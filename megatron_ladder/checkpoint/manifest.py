"""The manifest of a checkpoint: its contents, how the parts of the ranks are merged, and how it is read.

`manifest.json` is one JSON object, with one line per key, per tiling and per column of the tensors:

    format             "megatron_ladder checkpoint"
    schema_version     2
    iteration          completed optimizer steps
    consumed_samples   training samples seen
    model              sizes and wiring of the model (`ModelConfig.to_dict`)
    ...                other keys of the writer's header: training, optimizer (step and hyper-parameters), schedule,
                       rng (names of its tensors), tokenizer or null, layout and package versions of the writer; the
                       last two for information only
    files              [{"name", "size", "checksum"}], names without a directory; the tokenizer's files too
    tilings            [{"global_shape", "offsets", "extents", "writers"}]: the boxes of one or more tensors in columns;
                       one list of offsets and one of extents per dimension, and the rank that wrote each box
    tensors            {"name", "kind", "dtype", "tiling"}: columns; `tiling` is an index into `tilings`
    manifest_checksum  checksum of all bytes before the comma that precedes this line

The boxes of a tensor tile it: every element is in exactly one box. `file_name` and `box_key` give the file of a box and
its key there. Apart from the tilings, nothing in the manifest depends on how the tensors were distributed over ranks.

Tensors of one shape are usually distributed alike, so that there are few tilings, however many layers there are.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import itemgetter
from typing import Any

from megatron_ladder.checkpoint.checksum import DEFAULT_CHECKSUM, algorithm_of, checksum_of
from megatron_ladder.checkpoint.tensor_file import BY_NAME, parse_json
from megatron_ladder.checkpoint.tilings import (
    KINDS,
    FileIndex,
    StoredTensor,
    expect,
    merge_tensors,
    tensors_in_columns,
)
from megatron_ladder.config.training import OptimizerConfig
from megatron_ladder.flags import ValueType

FORMAT_NAME = "megatron_ladder checkpoint"
SCHEMA_VERSION = 2
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
    "optimizer": {"steps_taken": (int,)},
    "data_streams": [{}],
    "versions": {},
}
"""Optional keys and their types: of a value, of some keys of an object, or of all items of a list."""
_RESERVED_KEYS = ("format", "schema_version", "files", "tilings", "tensors", "manifest_checksum")
_CHECKSUM_LINE = re.compile(rb',\n "manifest_checksum": "([0-9a-z_]+:[0-9a-f]+)"\n}\n\Z')
_CHECKSUM_LINE_BYTES = 128


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
    tilings, tensors = merge_tensors(indices)
    manifest = {
        "format": FORMAT_NAME,
        "schema_version": SCHEMA_VERSION,
        **header,
        "files": sorted((file for index in indices for file in index["files"]), key=itemgetter("name")),
        "tilings": tilings,
        "tensors": tensors,
    }
    _check_manifest(manifest)
    return manifest


def encode_manifest(manifest: Mapping[str, Any], algorithm: str = DEFAULT_CHECKSUM) -> bytes:
    """Return the bytes of `manifest.json`, including its checksum; the values must be JSON-serialisable."""
    lines = []
    for key, value in manifest.items():
        if key == "tilings":
            rows = ",\n".join(f"  {_json(tiling)}" for tiling in value)
            lines.append(f' "tilings": [\n{rows}\n ]')
        elif key == "tensors":
            rows = ",\n".join(f"  {_json(name)}: {_json(column)}" for name, column in value.items())
            lines.append(f' "tensors": {{\n{rows}\n }}')
        else:
            lines.append(f" {_json(key)}: {json.dumps(value, allow_nan=False)}")
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f',\n "manifest_checksum": "{checksum_of(body, algorithm)}"\n}}\n'.encode()


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def decode_manifest(data: bytes) -> tuple[dict[str, Any], TensorTable]:
    """Parse `manifest.json` without trusting it: check that it is complete, unaltered, known and consistent.

    Returns:
        The manifest without tensors, tilings and its checksum, and the table of tensors.

    Raises:
        ValueError: the manifest is invalid.
    """
    manifest_checksum(data)
    manifest = parse_json(data.decode())
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
    found = checksum_of(data[: line.start()], algorithm_of(expected))
    if found != expected:
        raise ValueError(f"damaged: its last line records {expected}, its contents have {found}")
    return expected


def _check_manifest(manifest: Any) -> TensorTable:
    """Check everything that can be checked without the data files, and return the tensors."""
    where = "the manifest"
    if (name := expect(manifest, where, "format", str)) != FORMAT_NAME:
        raise ValueError(f"format is {name!r}, expected {FORMAT_NAME!r}")
    version = expect(manifest, where, "schema_version", int)
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version is {version}, and this program reads {SCHEMA_VERSION}: "
            "use the version of megatron_ladder that wrote the checkpoint"
        )
    for key in ("iteration", "consumed_samples"):
        if not 0 <= (count := expect(manifest, where, key, int)) < _MOST_STEPS:
            raise ValueError(f"{key} is {count}, expected 0 to {_MOST_STEPS - 1}")
    expect(manifest, where, "model", dict)
    for key in _OTHER_KEYS.keys() & manifest.keys():
        if key != "tokenizer" or manifest[key] is not None:
            _check_types(manifest[key], key, _OTHER_KEYS[key])
    sizes: dict[str, int] = {}
    for record in expect(manifest, where, "files", list):
        name = expect(record, "an entry of files", "name", str)
        if not is_plain_name(name):
            raise ValueError(f"the file name {name!r} is not a plain file name")
        if name in sizes:
            raise ValueError(f"the file {name} is listed twice")
        algorithm_of(expect(record, name, "checksum", str))
        sizes[name] = expect(record, name, "size", int)
    table: TensorTable = {kind: {} for kind in KINDS}
    for tensor in tensors_in_columns(manifest, sizes):
        if tensor.name in table[tensor.kind]:
            raise ValueError(f"{tensor.kind} of {tensor.name} is listed twice")
        if math.prod(tensor.global_shape) * BY_NAME[tensor.dtype].size > sum(sizes.values()):
            what = f"{tensor.kind} of {tensor.name}"
            raise ValueError(f"{what}: a tensor of shape {list(tensor.global_shape)} does not fit in the files")
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
