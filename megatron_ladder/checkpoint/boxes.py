"""Boxes: rectangular parts of a tensor, and the flat intervals that optimizer partitions cut out of them.

A rank holds a box of a canonical tensor (its tensor-parallel slice), flattened in row-major order. ZeRO assigns it an
interval of those elements that may begin and end anywhere. `cut_span` covers the interval with a few boxes, so that
files on disk do not depend on partitions; a reader cuts its own interval the same way.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_DIMENSIONS = 8
"""The tiling test visits the 2**n corners of each n-dimensional box."""


@dataclass(frozen=True, slots=True)
class Box:
    """The elements `offset[d] <= index[d] < offset[d] + extent[d]` of a tensor of one to eight dimensions."""

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

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects this box in a tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.extent, strict=True))

    def __str__(self) -> str:
        return f"[{', '.join(f'{part.start}:{part.stop}' for part in self.slices())}]"


class IntervalPiece(NamedTuple):
    """A box, and the position of its first element in the interval that it was cut from."""

    box: Box
    begin: int


def cut_span(held: Box, start: int, length: int) -> list[IntervalPiece]:
    """Return the fewest boxes that cover elements `start` to `start + length` of the flattened box `held`.

    Offsets are relative to the canonical tensor. In two dimensions there are at most three boxes: the rest of a row,
    whole rows, the beginning of a row. The pieces are in the order of the interval and contiguous in it.

    Raises:
        ValueError: the interval is empty or not inside the box.
    """
    if start < 0 or length < 1 or start + length > held.numel:
        raise ValueError(f"elements {start}:{start + length} are not inside a box of extent {list(held.extent)}")
    return [IntervalPiece(box.shifted(held.offset), begin) for box, begin in _cut(held.extent, start, length)]


def _cut(extent: Sequence[int], start: int, length: int) -> Iterator[IntervalPiece]:
    if len(extent) == 1:
        yield IntervalPiece(Box((start,), (length,)), 0)
        return
    row_size, end, position = math.prod(extent[1:]), start + length, start
    while position < end:
        row, column = divmod(position, row_size)
        whole_rows = 0 if column else (end - position) // row_size
        if whole_rows:
            count = whole_rows * row_size
            yield IntervalPiece(Box((row, *(0 for _ in extent[1:])), (whole_rows, *extent[1:])), position - start)
        else:
            count = min(row_size - column, end - position)
            for box, begin in _cut(extent[1:], column, count):
                yield IntervalPiece(Box((row, *box.offset), (1, *box.extent)), position - start + begin)
        position += count


def intersection(a: Box, b: Box) -> Box | None:
    """Return the elements that both boxes hold; None if there are none."""
    low = [max(x, y) for x, y in zip(a.offset, b.offset, strict=True)]
    high = [min(x + n, y + m) for x, n, y, m in zip(a.offset, a.extent, b.offset, b.extent, strict=True)]
    if any(end <= begin for begin, end in zip(low, high, strict=True)):
        return None
    return Box(tuple(low), tuple(end - begin for begin, end in zip(low, high, strict=True)))


def row_major_strides(extent: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(extent[dimension + 1 :]) for dimension in range(len(extent)))


def flat_range(extent: Sequence[int], inner: Box) -> tuple[int, int]:
    """Return the first element of `inner`, and one past its last, in a flattened tensor of that extent.

    The range contains other elements too unless its length is `inner.numel`.
    """
    strides = row_major_strides(extent)
    first = sum(offset * stride for offset, stride in zip(inner.offset, strides, strict=True))
    last = sum((count - 1) * stride for count, stride in zip(inner.extent, strides, strict=True))
    return first, first + last + 1


def first_untiled(
    shape: Sequence[int], offsets: NDArray[np.int64], extents: NDArray[np.int64]
) -> tuple[tuple[int, ...], bool] | None:
    """Return the first element of a tensor that is not in exactly one box; None if the boxes tile the tensor.

    A set of boxes, with multiplicity, is determined by its mixed difference: +1 or -1 at each corner of each box. So
    the boxes tile the tensor exactly if their signed corners cancel to the corners of the tensor itself; sorting them
    takes n log n steps for n boxes. At the smallest corner that does not cancel, the remainder is the number of boxes
    there minus one.

    Args:
        offsets, extents: [boxes, dimensions]; all boxes are inside the tensor.

    Returns:
        The index of the element, and whether several boxes hold it (otherwise none does).
    """
    dimensions = len(shape)
    offsets = np.concatenate([offsets, np.zeros((1, dimensions), np.int64)])
    extents = np.concatenate([extents, np.array([shape], np.int64)])
    weights = np.ones(len(offsets), np.int64)
    weights[-1] = -1
    choices = list(product((0, 1), repeat=dimensions))
    corners = np.concatenate([offsets + extents * np.array(choice, np.int64) for choice in choices])
    signs = np.concatenate([weights * (-1) ** sum(choice) for choice in choices])
    order = np.lexsort(corners.T[::-1])
    corners, signs = corners[order], signs[order]
    starts = np.flatnonzero(np.concatenate([[True], np.any(corners[1:] != corners[:-1], axis=1)]))
    left_over = np.add.reduceat(signs, starts)
    uncancelled = np.flatnonzero(left_over)
    if not len(uncancelled):
        return None
    first = uncancelled[0]
    return tuple(int(index) for index in corners[starts[first]]), bool(left_over[first] > 0)
