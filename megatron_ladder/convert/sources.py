"""Tensors on disk: each in one piece or in many boxes, in files or in memory that maps a file.

Nothing is read before it is copied. Element types have torch's names; only their sizes matter here.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.checkpoint.boxes import Box, intersection
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.manifest import StoredTensor
from megatron_ladder.errors import UserError

_FILES_OPEN = 64


@dataclass(frozen=True)
class StoredBox:
    """A rectangular part of a tensor, stored contiguously in row-major order."""

    path: Path
    """The file."""
    begin: int
    """First byte, in the file or in `mapped`."""
    box: Box
    mapped: memoryview | None = None
    """Bytes of the file if they are mapped already; None if they are to be read."""


@dataclass(frozen=True)
class SourceTensor:
    """A whole tensor."""

    name: str
    """The name in its directory."""
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]
    """They tile the tensor."""

    @property
    def whole(self) -> Box:
        """Return the box of all elements."""
        return whole_box(self.shape)

    def overlapping(self, wanted: Box) -> Iterator[tuple[StoredBox, Box]]:
        """Yield the boxes that share elements with `wanted`, and the shared elements."""
        for stored in self.boxes:
            shared = intersection(stored.box, wanted)
            if shared is not None:
                yield stored, shared


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of all elements of a tensor of that shape."""
    return Box(tuple(0 for _ in shape), tuple(shape))


def stored_tensor(checkpoint: Checkpoint, stored: StoredTensor) -> SourceTensor:
    """Return a tensor of a training checkpoint, written in any layout.

    Raises:
        UserError: the header of a file does not agree with the manifest.
    """
    boxes = []
    for index, file in enumerate(stored.files):
        position = checkpoint.position(stored, index)
        boxes.append(StoredBox(checkpoint.directory / file, position.begin, stored.box(index)))
    boxes.sort(key=lambda stored_box: stored_box.box.offset)
    return SourceTensor(stored.name, stored.global_shape, stored.dtype, tuple(boxes))


class Reader:
    """Reads bytes of many files, and keeps only a few of them open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read_box(self, stored: StoredBox, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a box from `begin` on, relative to the box; raise as `read_into`."""
        if stored.mapped is None:
            self.read_into(stored.path, stored.begin + begin, out)
        else:
            out[:] = stored.mapped[stored.begin + begin : stored.begin + begin + len(out)]

    def read_into(self, path: Path, begin: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `begin` on.

        Raises:
            UserError: the file is too short or cannot be read.
        """
        try:
            descriptor = self._descriptor(path)
            while out:
                count = os.preadv(descriptor, [out], begin)
                if count == 0:
                    raise UserError(f"{path}: ends {len(out)} bytes before the end of a tensor")
                begin, out = begin + count, out[count:]
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: Path) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= _FILES_OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[path] = os.open(path, os.O_RDONLY)
        return self._open[path]
