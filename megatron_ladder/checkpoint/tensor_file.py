"""Tensors in safetensors files.

The safetensors library reads them: it maps a file, so a part of a tensor costs only its bytes. It does not write
checkpoints, because it serialises only from memory and without a checksum of the bytes.

Files have checksums, written as "xxh3_128:digits". XXH3-128 detects damage at memory speed. A checksum inside a
checkpoint does not make the checkpoint trustworthy; containing no code does.

Layout (https://github.com/huggingface/safetensors): u64 little-endian length n of the header; n bytes of JSON,
key -> {"dtype", "shape", "data_offsets": [begin, end]}, padded with blanks; the data without holes, to which the
offsets are relative.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from megatron_ladder.blueprint.boxes import Box
from megatron_ladder.errors import UserError
from megatron_ladder.files import naming, reject_pointer

if TYPE_CHECKING:
    # Programs that only look at checkpoints start without torch, whose import takes seconds.
    import torch

_CHUNK_BYTES = 1 << 24
"""Bytes copied from a device at a time: the only extra memory that a save takes."""
_PIECE_BYTES = 1 << 19
"""Bytes written, and hashed, at a time: few enough to be hashed from a core's cache."""
STORED_NAMES: Mapping[str, str] = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float64": "F64",
    "uint8": "U8",
    "int64": "I64",
}
"""The element types of checkpoints: name in torch and in manifests -> name in safetensors."""


def element_name(dtype: torch.dtype) -> str:
    """Return the name of an element type in manifests."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor on disk: the boxes that tile it, and the file and key of each."""

    name: str
    kind: str
    dtype: str
    """The name in torch, such as `bfloat16`."""
    shape: tuple[int, ...]
    offsets: NDArray[np.int64]
    """[boxes, dimensions]. Tensors that are distributed alike share these arrays."""
    extents: NDArray[np.int64]
    """[boxes, dimensions]."""
    writers: NDArray[np.int64]
    """[boxes]; the rank that wrote each."""
    writer_files: Mapping[int, str]
    """Writer -> name of its file."""

    def box(self, index: int) -> Box:
        return Box(tuple(self.offsets[index].tolist()), tuple(self.extents[index].tolist()))

    def file(self, index: int) -> str:
        """Return the name of the file that holds a box."""
        return self.writer_files[int(self.writers[index])]

    def key(self, index: int) -> str:
        """Return the key of a box in its file."""
        return box_key(self.kind, self.name, self.box(index))

    def files(self) -> set[str]:
        """Return the names of the files that hold the boxes."""
        return {self.writer_files[writer] for writer in np.unique(self.writers).tolist()}

    def overlapping(self, wanted: Box) -> list[int]:
        """Return the indices of the boxes that share elements with `wanted`."""
        low = np.array(wanted.offset, np.int64)
        high = low + np.array(wanted.extent, np.int64)
        shared = (self.offsets < high) & (self.offsets + self.extents > low)
        return [int(index) for index in np.flatnonzero(shared.all(axis=1))]


def box_key(kind: str, name: str, box: Box) -> str:
    """Return the key of a box in a file of a checkpoint."""
    return f"{kind}:{name}@{','.join(map(str, box.offset))}"


def open_safetensors(path: Path) -> Any:
    """Return a file as `safetensors.safe_open` does; raise UserError if it is not complete."""
    try:
        return safe_open(path, "pt")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: copy or download it") from None
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            reject_pointer(path)
        reason = getattr(error, "strerror", None) or "truncated or damaged"
        raise UserError(f"{path}: not a complete safetensors file: {reason}: copy or download it again") from None


def stored_tensor(path: Path, file: Any, key: str) -> torch.Tensor:
    """Return a tensor of an open file, whose data stay in the mapped file; raise UserError if there is none."""
    try:
        return file.get_tensor(key)
    except (KeyError, ValueError, SafetensorError):
        raise UserError(f"{path}: has no usable tensor {key!r}") from None


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have one shape, one element type, and the same bits, which NaN may have, too."""
    import torch

    is_alike = one.dtype == other.dtype and one.shape == other.shape
    return is_alike and torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity; reads it once, without temporary tensors."""
    if tensor.numel() == 0:
        return True
    low, high = tensor.aminmax()
    return bool(low.isfinite() & high.isfinite())


def write_tensor_file(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[int, str]:
    """Write and fsync a new safetensors file; return its size in bytes, and the checksum of the bytes written.

    The tensors are contiguous, on any device. Wider element types are written first, so that every tensor is aligned.
    """
    import torch

    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    size = 0
    for key, tensor in ordered:
        stored_name = STORED_NAMES[element_name(tensor.dtype)]
        offsets = [size, size + tensor.nbytes]
        entries[key] = {"dtype": stored_name, "shape": list(tensor.shape), "data_offsets": offsets}
        size += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    hasher = xxhash.xxh3_128()
    with naming(path), open(path, "xb") as file:
        hasher.update(header)
        file.write(header)
        for _, tensor in ordered:
            flat = tensor.detach().view(-1)
            for chunk in flat.split(_CHUNK_BYTES // flat.element_size()):
                data = chunk.cpu().view(torch.uint8).numpy().data
                for begin in range(0, len(data), _PIECE_BYTES):
                    piece = data[begin : begin + _PIECE_BYTES]
                    hasher.update(piece)
                    file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return len(header) + size, _formatted(hasher)


def checksum_of(data: bytes) -> str:
    """Return the checksum of bytes in memory."""
    return _formatted(xxhash.xxh3_128(data))


def file_checksum(path: Path) -> str:
    """Read a file and return its checksum."""
    with open(path, "rb", buffering=0) as file:
        return _formatted(hashlib.file_digest(file, xxhash.xxh3_128))  # type: ignore[arg-type]


def _formatted(hasher: xxhash.xxh3_128) -> str:
    return f"xxh3_128:{hasher.hexdigest()}"
