"""The plan of a copy: where every tensor comes from and goes to, before the first byte is read or written.

A source tensor is in one piece or in many boxes, in files or in memory that maps a file. A plan lists tensors in the
order in which they are copied. The tensors of each file have the same order, so every file is written from beginning to
end and its checksum is taken on the way. Element types have torch's names.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.checkpoint.boxes import Box
from megatron_ladder.checkpoint.hf_directory import SourceTensor
from megatron_ladder.checkpoint.tensor_file import BY_NAME, FileLayout
from megatron_ladder.errors import UserError


class TargetBox(NamedTuple):
    """The part of a tensor that is written to one file."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor by canonical name and kind in a manifest, its new dtype, and its boxes, at most one per file."""

    name: str
    kind: str
    source: SourceTensor
    dtype: str
    boxes: tuple[TargetBox, ...]


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

    @property
    def size(self) -> int:
        """Return the bytes of the whole file."""
        return len(self.header()) + self.data_bytes


@dataclass(frozen=True)
class CopyPlan:
    """Tensors in the order of copying, and the files that they make up."""

    tensors: tuple[CopiedTensor, ...]
    files: tuple[PlannedFile, ...]

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all data, without headers."""
        return sum(file.data_bytes for file in self.files)

    @property
    def source_files(self) -> list[Path]:
        """Return the files that hold the source tensors."""
        return sorted({stored.path for tensor in self.tensors for stored in tensor.source.boxes})

    def fingerprint(self, *more: object) -> str:
        """Return sixteen hexadecimal digits that identify the plan, its sources, and other values by their `repr`."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0".encode() + file.header())
        for tensor in self.tensors:
            if (order := tensor.source.order) is not None:
                digest.update(f"{tensor.name}\0{order.dim}\0".encode() + order.source.tobytes())
        for path in self.source_files:
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
