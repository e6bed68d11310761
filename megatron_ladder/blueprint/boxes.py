"""Rectangular parts of tensors.

A rank holds a slice of each tensor, which is a box, with its elements flattened in row-major order. ZeRO assigns it an
interval of those elements that may begin and end anywhere. `Box.cut` covers the interval with a few boxes, so that
files on disk do not depend on partitions; a reader cuts its own interval the same way.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The elements `offset[d] <= index[d] < offset[d] + extent[d]` of a tensor."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Box":
        """Return the box of all elements of a tensor of that shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.extent)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether this is a non-empty box of a tensor of that shape."""
        return len(self.offset) == len(self.extent) == len(shape) and all(
            offset >= 0 and extent >= 1 and offset + extent <= size
            for offset, extent, size in zip(self.offset, self.extent, shape, strict=True)
        )

    def shifted(self, origin: Sequence[int]) -> "Box":
        """Return the box with `origin` added to its offset."""
        return Box(tuple(a + b for a, b in zip(self.offset, origin, strict=True)), self.extent)

    def within(self, outer: "Box") -> "Box":
        """Return the same elements with offsets relative to the corner of `outer`."""
        return self.shifted([-offset for offset in outer.offset])

    def intersection(self, other: "Box") -> "Box | None":
        """Return the elements that both boxes hold; None if there are none."""
        low = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = zip(self.offset, self.extent, other.offset, other.extent, strict=True)
        extent = [min(a + n, b + m) - start for (a, n, b, m), start in zip(ends, low, strict=True)]
        return Box(tuple(low), tuple(extent)) if all(size > 0 for size in extent) else None

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects this box in a tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.extent, strict=True))

    def cut(self, start: int, length: int) -> "list[tuple[Box, int]]":
        """Return the fewest boxes that cover elements `start` to `start + length` of this box, flattened.

        Each comes with the position of its first element in the interval. In two dimensions there are at most three:
        the rest of a row, whole rows, the beginning of a row. They are contiguous in the interval, and in its order.

        Raises:
            ValueError: the interval is empty or not inside the box.
        """
        if start < 0 or length < 1 or start + length > self.numel:
            raise ValueError(f"elements {start}:{start + length} are not inside a box of extent {list(self.extent)}")
        return [(box.shifted(self.offset), begin) for box, begin in _cut(self.extent, start, length)]

    def __str__(self) -> str:
        return f"[{', '.join(f'{part.start}:{part.stop}' for part in self.slices())}]"


def _cut(extent: Sequence[int], start: int, length: int) -> Iterator[tuple[Box, int]]:
    if len(extent) == 1:
        yield Box((start,), (length,)), 0
        return
    row_size = math.prod(extent[1:])
    end = start + length
    position = start
    while position < end:
        row, column = divmod(position, row_size)
        whole_rows = 0 if column else (end - position) // row_size
        if whole_rows:
            count = whole_rows * row_size
            yield Box((row, *(0 for _ in extent[1:])), (whole_rows, *extent[1:])), position - start
        else:
            count = min(row_size - column, end - position)
            for box, begin in _cut(extent[1:], column, count):
                yield Box((row, *box.offset), (1, *box.extent)), position - start + begin
        position += count
