"""The plan of a copy: the content and position of every tensor in every file, before the first byte is written.

A plan lists tensors in the order in which they are copied. The tensors of each file have the same order, so every file
is written from beginning to end and its checksum is taken on the way.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ladder.checkpoint.boxes import Box
from megatron_ladder.checkpoint.tensor_file import BY_NAME, FileLayout
from megatron_ladder.convert.sources import SourceTensor
from megatron_ladder.errors import UserError


class TargetBox(NamedTuple):
    """The part of a tensor that is written to one file."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor and the files that its parts are written to."""

    name: str
    """Canonical name."""
    kind: str
    """Kind in a manifest."""
    source: SourceTensor
    dtype: str
    """Element type in the target."""
    boxes: tuple[TargetBox, ...]
    """At most one per file."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row in the wider of the two element types."""
        size = max(BY_NAME[self.dtype].size, BY_NAME[self.source.dtype].size)
        return math.prod(self.source.shape[1:]) * size


class PlannedFile(FileLayout):
    """A safetensors file that is to be written."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def header(self) -> bytes:
        """Return the bytes before the data; raise UserError if they are more than readers accept."""
        try:
            return super().header()
        except ValueError as error:
            raise UserError(f"{self.name}: {error}") from None


@dataclass(frozen=True)
class CopyPlan:
    """Tensors in the order of copying, and the files that they make up."""

    tensors: tuple[CopiedTensor, ...]
    files: tuple[PlannedFile, ...]

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all data, without headers."""
        return sum(file.data_bytes for file in self.files)

    def fingerprint(self, *more: object) -> str:
        """Return sixteen hexadecimal digits that identify the plan and its sources.

        Args:
            more: other values that the result depends on; compared by their `repr`.
        """
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0".encode() + file.header())
        for path in sorted({stored.path for tensor in self.tensors for stored in tensor.source.boxes}):
            state = path.stat()
            digest.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
        digest.update(repr(more).encode())
        return digest.hexdigest()[:16]


def make_plan(groups: Iterable[Sequence[CopiedTensor]]) -> CopyPlan:
    """Plan the files of groups of tensors; no file may have tensors of two groups.

    Wider element types come first within a group, so that all tensors are aligned.
    """
    ordered = [tensor for group in groups for tensor in sorted(group, key=lambda one: -BY_NAME[one.dtype].size)]
    files: dict[str, PlannedFile] = {}
    for tensor in ordered:
        for target in tensor.boxes:
            file = files.setdefault(target.file, PlannedFile(target.file))
            file.add(target.key, tensor.dtype, target.box.extent)
    return CopyPlan(tuple(ordered), tuple(files.values()))
