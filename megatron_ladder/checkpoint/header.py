"""Headers of data files, read with distrust. Needs no torch: what a file holds can be told without it.

Layout of the file (https://github.com/huggingface/safetensors): u64 little-endian length n of the header; n
bytes of JSON, key -> {"dtype", "shape", "data_offsets": [begin, end]}, padded with blanks; the data, to which
the offsets are relative, without holes.
"""

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_ladder.errors import UserError


class ElementType(NamedTuple):
    """A type of numbers that a checkpoint may hold."""

    name: str
    """As torch and manifests spell it."""
    stored_name: str
    """As safetensors spells it."""
    size: int
    """Bytes."""


ELEMENT_TYPES: tuple[ElementType, ...] = (
    ElementType("float32", "F32", 4),
    ElementType("bfloat16", "BF16", 2),
    ElementType("float16", "F16", 2),
    ElementType("float64", "F64", 8),
    ElementType("uint8", "U8", 1),
    ElementType("int64", "I64", 8),
)
BY_NAME: dict[str, ElementType] = {element.name: element for element in ELEMENT_TYPES}
BY_STORED_NAME: dict[str, ElementType] = {element.stored_name: element for element in ELEMENT_TYPES}


LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Safetensors' own limit."""


def element_name(dtype: object) -> str:
    """How manifests spell a torch.dtype."""
    return str(dtype).removeprefix("torch.")


class FilePlace(NamedTuple):
    """Where a tensor lies in a file, and what it is there."""

    dtype: str
    """Safetensors' name."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the beginning of the file."""
    end: int
    """One past the last byte."""


def parse_json(text: str) -> Any:
    """JSON without what lets two readers see different things: duplicate keys, NaN and Infinity.

    Raises:
        ValueError: that, a text that is not JSON, or one nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_object_of, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} occurs more than once")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def read_header(path: Path) -> dict[str, FilePlace]:
    """Where each tensor of a safetensors file lies.

    Raises:
        UserError: the file is not a whole safetensors file; the file and what is wrong are named.
    """
    try:
        with open(path, "rb") as file:
            return _parse_header(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a whole safetensors file: {error}") from None


def _parse_header(file: BinaryIO) -> dict[str, FilePlace]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = parse_json(file.read(length).decode())
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    data_begin = LENGTH_BYTES + length
    places = {key: _place(key, value, data_begin) for key, value in header.items() if key != "__metadata__"}
    expected = data_begin
    for key, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != expected:
            raise ValueError(
                f"{key!r} begins at byte {place.begin}, and what is before it ends at {expected}"
            )
        expected = place.end
    if expected != size:
        raise ValueError(f"its tensors end at byte {expected}, and the file has {size}")
    return places


def _place(key: str, value: Any, data_begin: int) -> FilePlace:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the entry of {key!r} lacks dtype, shape or data_offsets") from None
    sizes = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    if not isinstance(dtype, str) or not sizes or begin > end:
        raise ValueError(f"the entry of {key!r} has a dtype, shape or data_offsets of the wrong kind")
    element = BY_STORED_NAME.get(dtype)
    if element is not None and end - begin != math.prod(shape) * element.size:
        raise ValueError(f"{key!r} has {end - begin} bytes, which is not {dtype} of shape {list(shape)}")
    return FilePlace(dtype, shape, data_begin + begin, data_begin + end)
