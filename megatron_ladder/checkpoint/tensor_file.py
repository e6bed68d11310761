"""Safetensors files: written in one pass with their checksum, and read without trust.

Layout (https://github.com/huggingface/safetensors): u64 little-endian length n of the header; n bytes of JSON,
key -> {"dtype", "shape", "data_offsets": [begin, end]}, padded with blanks; the data without holes, to which the
offsets are relative.

The safetensors library is not used here: it serialises only from memory, without a checksum of the written bytes, it
does not return byte positions, and it accepts duplicate keys. Headers are read without importing torch.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from megatron_ladder.checkpoint.boxes import Box, flat_range, row_major_strides
from megatron_ladder.checkpoint.checksum import CHECKSUMS, CHUNK_BYTES, DEFAULT_CHECKSUM, PIECE_BYTES
from megatron_ladder.errors import UserError

if TYPE_CHECKING:
    import torch


class ElementType(NamedTuple):
    """An element type: its name in torch and in manifests, its name in safetensors, and its bytes."""

    name: str
    stored_name: str
    size: int


_ELEMENT_TYPES = (
    ElementType("float32", "F32", 4),
    ElementType("bfloat16", "BF16", 2),
    ElementType("float16", "F16", 2),
    ElementType("float64", "F64", 8),
    ElementType("uint8", "U8", 1),
    ElementType("int64", "I64", 8),
)
BY_NAME: dict[str, ElementType] = {element.name: element for element in _ELEMENT_TYPES}
BY_STORED_NAME: dict[str, ElementType] = {element.stored_name: element for element in _ELEMENT_TYPES}

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


def element_name(dtype: torch.dtype) -> str:
    """Return the name of an element type in manifests."""
    return str(dtype).removeprefix("torch.")


class TensorPosition(NamedTuple):
    """A tensor in a file: its safetensors dtype, its shape, its first byte, and one past its last."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _FileLayout:
    """The header of a file that is to be written, tensor after tensor."""

    def __init__(self) -> None:
        self.data_bytes = 0
        self.entries: dict[str, Any] = {}
        """key -> dtype, shape, data_offsets."""

    def add(self, key: str, dtype: str, shape: Sequence[int]) -> None:
        """Append a tensor; `dtype` is the name in torch."""
        begin = self.data_bytes
        self.data_bytes += math.prod(shape) * BY_NAME[dtype].size
        stored_name = BY_NAME[dtype].stored_name
        self.entries[key] = {"dtype": stored_name, "shape": list(shape), "data_offsets": [begin, self.data_bytes]}

    def header(self) -> bytes:
        """Return the bytes before the data; raise ValueError if they are more than readers accept."""
        text = json.dumps({"__metadata__": {"format": "pt"}, **self.entries}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MAX_HEADER_BYTES:
            raise ValueError(f"{len(self.entries)} tensors need a header of {len(text)} bytes, over the limit")
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def write_tensor_file(
    path: Path, tensors: Sequence[tuple[str, torch.Tensor]], algorithm: str = DEFAULT_CHECKSUM
) -> tuple[int, str]:
    """Write and fsync a new safetensors file.

    Args:
        tensors: keys and contiguous tensors, on any device. Wider element types are written first, so that every
            tensor is aligned.

    Returns:
        The size of the file in bytes, and the checksum of the bytes on their way to the file.

    Raises:
        FileExistsError: the file exists.
        ValueError: the header would be longer than readers accept.
    """
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    layout = _FileLayout()
    for key, tensor in ordered:
        layout.add(key, element_name(tensor.dtype), tensor.shape)
    header = layout.header()
    digest = CHECKSUMS[algorithm]()
    with open(path, "xb") as file:
        digest.update(header)
        file.write(header)
        for _, tensor in ordered:
            flat = tensor.detach().view(-1)
            elements = CHUNK_BYTES // tensor.element_size()
            for first in range(0, flat.numel(), elements):
                chunk = _memory(flat[first : first + elements].cpu())
                for begin in range(0, len(chunk), PIECE_BYTES):
                    piece = chunk[begin : begin + PIECE_BYTES]
                    digest.update(piece)
                    file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return len(header) + layout.data_bytes, f"{algorithm}:{digest.hexdigest()}"


def _memory(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.view(-1).view(torch.uint8).numpy().data


def parse_json(text: str) -> Any:
    """Parse JSON strictly: two readers must not see different values.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or has duplicate keys or numbers that are not finite.
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise ValueError(f"the key {key!r} occurs more than once")
        return found

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number:.40} is not a finite number")
        return value

    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def open_to_read(path: Path) -> BinaryIO:
    """Open a file; `readinto` fills large tensors without a copy."""
    return open(path, "rb")


def read_header(
    path: Path, opened: Callable[[Path], AbstractContextManager[BinaryIO]] = open_to_read
) -> dict[str, TensorPosition]:
    """Return the position of each tensor in a safetensors file; `opened` as in `read_part`.

    Raises:
        UserError: the file is not a complete safetensors file.
    """
    try:
        with opened(path) as file:
            file.seek(0)
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size} bytes")
            return _parse_header(file.read(length), size)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a complete safetensors file: {error}") from None


def _parse_header(text: bytes, file_size: int) -> dict[str, TensorPosition]:
    header = parse_json(text.decode())
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    expected = data_begin = _LENGTH_BYTES + len(text)
    found = {key: _position(key, value, data_begin) for key, value in header.items() if key != "__metadata__"}
    for key, position in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if position.begin != expected:
            raise ValueError(f"{key!r} begins at byte {position.begin}, expected {expected}")
        expected = position.end
    if expected != file_size:
        raise ValueError(f"its tensors end at byte {expected}, and the file has {file_size} bytes")
    return found


def _position(key: str, value: Any, data_begin: int) -> TensorPosition:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the entry of {key!r} lacks dtype, shape or data_offsets") from None
    sizes = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    if not isinstance(dtype, str) or not sizes or begin > end:
        raise ValueError(f"the entry of {key!r} has an invalid dtype, shape or data_offsets")
    element = BY_STORED_NAME.get(dtype)
    if element is not None and end - begin != math.prod(shape) * element.size:
        raise ValueError(f"{key!r} has {end - begin} bytes, which is not {dtype} of shape {list(shape)}")
    return TensorPosition(dtype, shape, data_begin + begin, data_begin + end)


def read_part(
    path: Path,
    begin: int,
    extent: Sequence[int],
    part: Box,
    dtype: str,
    out: torch.Tensor,
    mapped: memoryview | None = None,
    opened: Callable[[Path], AbstractContextManager[BinaryIO]] = open_to_read,
) -> None:
    """Fill `out` with a part of a stored tensor, reading only the bytes around the part.

    Args:
        begin: first byte of the stored tensor, in the file or in `mapped`.
        extent: shape of the stored tensor.
        part: the elements to read, relative to the stored tensor.
        dtype: element type of the stored tensor.
        out: [*part.extent], of any dtype, on any device, contiguous or not.
        mapped: the bytes of the file if they are mapped already.
        opened: returns the open file; only one thread reads from it.

    Raises:
        UserError: the file cannot be read or is too short.
    """
    import torch

    stored_dtype: torch.dtype = getattr(torch, dtype)
    first, end = flat_range(extent, part)
    begin, count = begin + first * stored_dtype.itemsize, end - first
    plain = out.is_contiguous() and out.dtype == stored_dtype and out.device.type == "cpu"
    try:
        if mapped is None and plain and count == part.numel:
            remaining = _memory(out)
            with opened(path) as file:
                file.seek(begin)
                while remaining and (read := file.readinto(remaining)):  # type: ignore[attr-defined]
                    remaining = remaining[read:]
            if remaining:
                raise ValueError(f"ends {len(remaining)} bytes before the end of a tensor")
            return
        page = 0
        source: Any = mapped
        if source is None:
            page = begin - begin % mmap.ALLOCATIONGRANULARITY
            length = begin + count * stored_dtype.itemsize - page
            with opened(path) as file:
                # A private copy-on-write mapping, since torch warns about read-only memory; nothing writes to it.
                source = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=page)
        flat = torch.frombuffer(source, dtype=stored_dtype, count=count, offset=begin - page)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    out.copy_(flat.as_strided(part.extent, row_major_strides(extent)))
