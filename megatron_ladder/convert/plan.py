"""What is to be written: every file to its last byte's place, before the first byte is.

A plan lists tensors in the order in which they are copied. Each file's tensors lie in it in that same order, so that
every file is written from its beginning to its end and its checksum can be taken on the way.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_ladder.checkpoint.boxes import Box
from megatron_ladder.checkpoint.header import BY_NAME, LENGTH_BYTES, MAX_HEADER_BYTES
from megatron_ladder.convert.sources import SourceTensor
from megatron_ladder.errors import UserError


class TargetBox(NamedTuple):
    """A part of a tensor that goes to one file."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor, and where its parts go."""

    name: str
    """Canonical."""
    kind: str
    """What it is to training, as in a manifest."""
    source: SourceTensor
    dtype: str
    """That it is written in."""
    boxes: tuple[TargetBox, ...]
    """One in a file at most; in each file, its elements row by row."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension, in the wider of both element types."""
        size = max(BY_NAME[self.dtype].size, BY_NAME[self.source.dtype].size)
        return math.prod(self.source.shape[1:]) * size

    @property
    def target_bytes(self) -> int:
        """Bytes that are written."""
        return sum(target.box.numel for target in self.boxes) * BY_NAME[self.dtype].size


@dataclass
class PlannedFile:
    """A safetensors file that is to be written."""

    name: str
    entries: dict[str, Any] = field(default_factory=dict)
    """Its header: key -> dtype, shape, data_offsets."""
    data_bytes: int = 0

    def add(self, key: str, dtype: str, shape: Sequence[int]) -> None:
        """Puts a tensor behind the others."""
        begin = self.data_bytes
        self.data_bytes += math.prod(shape) * BY_NAME[dtype].size
        stored_name = BY_NAME[dtype].stored_name
        self.entries[key] = {"dtype": stored_name, "shape": list(shape), "data_offsets": [begin, self.data_bytes]}

    def header(self) -> bytes:
        """The bytes before the data.

        Raises:
            UserError: they are more than any reader accepts.
        """
        text = json.dumps({"__metadata__": {"format": "pt"}, **self.entries}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise UserError(f"{self.name}: its {len(self.entries)} tensors need a header of {len(text)} bytes")
        return len(text).to_bytes(LENGTH_BYTES, "little") + text


@dataclass(frozen=True)
class Plan:
    """Tensors in the order of copying, and the files that they make."""

    tensors: tuple[CopiedTensor, ...]
    files: tuple[PlannedFile, ...]

    @property
    def bytes_in_all(self) -> int:
        """Of numbers, not of headers."""
        return sum(file.data_bytes for file in self.files)

    def fingerprint(self, *more: object) -> str:
        """Sixteen hexadecimal digits that are others when anything of the plan or its sources is.

        Args:
            more: what else the result depends on; told apart by its text.
        """
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0".encode() + file.header())
        for path in sorted({stored.path for tensor in self.tensors for stored in tensor.source.boxes}):
            state = path.stat()
            digest.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
        digest.update(repr(more).encode())
        return digest.hexdigest()[:16]


def make_plan(groups: Iterable[Sequence[CopiedTensor]]) -> Plan:
    """Plans the files of groups of tensors; no file may have tensors of two groups.

    Within a group wider element types are put first, so that all tensors are aligned.
    """
    ordered = [tensor for group in groups for tensor in sorted(group, key=lambda one: -BY_NAME[one.dtype].size)]
    files: dict[str, PlannedFile] = {}
    for tensor in ordered:
        for target in tensor.boxes:
            file = files.setdefault(target.file, PlannedFile(target.file))
            file.add(target.key, tensor.dtype, target.box.extent)
    return Plan(tuple(ordered), tuple(files.values()))
