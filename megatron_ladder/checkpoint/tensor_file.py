"""Data files: safetensors written in one pass with their checksum. Their layout stands in `header`."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ladder.checkpoint.checksum import CHECKSUMS, CHUNK_BYTES, DEFAULT_CHECKSUM, PIECE_BYTES
from megatron_ladder.checkpoint.header import ELEMENT_TYPES, LENGTH_BYTES, MAX_HEADER_BYTES

DTYPES: dict[str, torch.dtype] = {element.stored_name: getattr(torch, element.name) for element in ELEMENT_TYPES}
"""Safetensors' names of the element types that a checkpoint may hold."""

_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: {len(ordered)} tensors need a header of {len(text)} bytes")
    digest = CHECKSUMS[algorithm]()
    with open(path, "xb") as file:
        for head in (len(text).to_bytes(LENGTH_BYTES, "little"), text):
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
    return LENGTH_BYTES + len(text) + end, f"{algorithm}:{digest.hexdigest()}"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in host memory, without a copy of all of them."""
    flat = tensor.detach().view(-1)
    elements = CHUNK_BYTES // tensor.element_size()
    for begin in range(0, flat.numel(), elements):
        yield bytes_of(flat[begin : begin + elements].cpu())
