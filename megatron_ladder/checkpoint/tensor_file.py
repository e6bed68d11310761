"""Data files: safetensors written in one pass with their checksum, and their headers read with distrust.

Layout of the file (https://github.com/huggingface/safetensors): u64 little-endian length n of the header; n
bytes of JSON, key -> {"dtype", "shape", "data_offsets": [begin, end]}, padded with blanks; the data, to which
the offsets are relative, without holes.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from megatron_ladder.checkpoint.checksum import CHECKSUMS, CHUNK_BYTES, DEFAULT_CHECKSUM, PIECE_BYTES
from megatron_ladder.errors import UserError

DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I64": torch.int64,
}
"""Safetensors' names of the element types that a checkpoint may hold."""

_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""Safetensors' own limit."""


class FilePlace(NamedTuple):
    """Where a tensor lies in a file, and what it is there."""

    dtype: str
    """Safetensors' name."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the beginning of the file."""
    end: int
    """One past the last byte."""


def write_tensor_file(
    path: Path, tensors: Sequence[tuple[str, torch.Tensor]], algorithm: str = DEFAULT_CHECKSUM
) -> tuple[int, str]:
    """Writes and fsyncs a new safetensors file.

    Args:
        tensors: keys and contiguous tensors, on any device. Wider element types are put first, so that every
            tensor is aligned.
        algorithm: of the checksum.

    Returns:
        Bytes in the file, and its checksum, taken of the bytes on their way to the file.

    Raises:
        FileExistsError: there is such a file.
        ValueError: the header would be longer than any reader accepts.
    """
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(f"{path}: {len(ordered)} tensors need a header of {len(text)} bytes")
    digest = CHECKSUMS[algorithm]()
    with open(path, "xb") as file:
        for head in (len(text).to_bytes(_LENGTH_BYTES, "little"), text):
            digest.update(head)
            file.write(head)
        for _, tensor in ordered:
            for chunk in _chunks(tensor):
                for begin in range(0, len(chunk), PIECE_BYTES):
                    piece = chunk[begin : begin + PIECE_BYTES]
                    digest.update(piece)
                    file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return _LENGTH_BYTES + len(text) + end, f"{algorithm}:{digest.hexdigest()}"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in host memory, without a copy of all of them."""
    flat = tensor.detach().view(-1)
    elements = CHUNK_BYTES // tensor.element_size()
    for begin in range(0, flat.numel(), elements):
        yield bytes_of(flat[begin : begin + elements].cpu())


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
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = parse_json(file.read(length).decode())
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    data_begin = _LENGTH_BYTES + length
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
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{key!r} has {end - begin} bytes, which is not {dtype} of shape {list(shape)}")
    return FilePlace(dtype, shape, data_begin + begin, data_begin + end)
