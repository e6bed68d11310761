"""Tensors where they lie: in files, each in one piece or in many boxes, or in memory that maps a file.

Nothing is read before it is copied. Element types are named as torch names them; what a number means is no concern
here, only how many bytes it takes.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.checkpoint.boxes import Box, intersection
from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.checkpoint.header import FilePlace
from megatron_ladder.checkpoint.manifest import StoredTensor
from megatron_ladder.errors import UserError

_FILES_OPEN = 64


@dataclass(frozen=True)
class StoredBox:
    """A rectangular part of a tensor, its elements row by row from a place on."""

    path: Path
    """The file."""
    begin: int
    """First byte, in the file or in `mapped`."""
    box: Box
    mapped: memoryview | None = None
    """Bytes of the file that are mapped already; None if they are to be read."""


@dataclass(frozen=True)
class SourceTensor:
    """A whole tensor."""

    name: str
    """As its directory calls it."""
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]
    """They tile it."""

    @property
    def whole(self) -> Box:
        """All its elements."""
        return whole_box(self.shape)

    def in_rows(self, rows: Box) -> Iterator[tuple[StoredBox, Box]]:
        """The boxes that share elements with `rows`, and what they share."""
        for stored in self.boxes:
            shared = intersection(stored.box, rows)
            if shared is not None:
                yield stored, shared


def whole_box(shape: Sequence[int]) -> Box:
    """All elements of a tensor of that shape."""
    return Box(tuple(0 for _ in shape), tuple(shape))


def whole_tensor(name: str, dtype: str, shape: Sequence[int], path: Path, place: FilePlace) -> SourceTensor:
    """A tensor that lies in one piece in a safetensors file."""
    return SourceTensor(name, tuple(shape), dtype, (StoredBox(path, place.begin, whole_box(shape)),))


def stored_tensor(checkpoint: Checkpoint, stored: StoredTensor) -> SourceTensor:
    """A tensor of a training checkpoint, written in any layout.

    Raises:
        UserError: a file's header does not agree with the manifest.
    """
    boxes = []
    for index, file in enumerate(stored.files):
        place = checkpoint.place(stored, index)
        boxes.append(StoredBox(checkpoint.directory / file, place.begin, stored.box(index)))
    boxes.sort(key=lambda stored_box: stored_box.box.offset)
    return SourceTensor(stored.name, stored.global_shape, stored.dtype, tuple(boxes))


class Reader:
    """Reads bytes of files, few of which it keeps open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read_box(self, stored: StoredBox, begin: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a box from `begin` on, counted in the box; raises as `read_into`."""
        if stored.mapped is None:
            self.read_into(stored.path, stored.begin + begin, out)
        else:
            out[:] = stored.mapped[stored.begin + begin : stored.begin + begin + len(out)]

    def read_into(self, path: Path, begin: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a file from `begin` on.

        Raises:
            UserError: the file ends before, or cannot be read.
        """
        try:
            descriptor = self._descriptor(path)
            while out:
                count = os.preadv(descriptor, [out], begin)
                if count == 0:
                    raise UserError(f"{path}: ends {len(out)} bytes before the end of a tensor in it")
                begin, out = begin + count, out[count:]
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None

    def close(self) -> None:
        """Closes all files."""
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
