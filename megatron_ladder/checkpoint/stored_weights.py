"""Weights as Hugging Face directories store them, and what stacks of experts hold.

A stack has the matrices of all experts of a layer [E, ...], in one of two layouts:

    gate_up_proj  [E, 2 f, h]   Qwen3: rows 0 to f - 1 are gates, the others ups
    gate_up_proj  [E, h, 2 f]   gpt-oss: transposed, and gates and ups alternate:
                                column 0 is gate 0, column 1 is up 0, column 2 is gate 1, ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Index = tuple[slice, ...]
"""A slice of each dimension."""


class ReadableWeight(Protocol):
    """Weights that are read in parts."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the weights."""

    def read(self, index: Index, out: Tensor) -> None:
        """Fill `out`, of any dtype and on any device, with a part of the tensor."""

    def whole(self) -> Tensor:
        """Return the whole tensor."""


class StoredWeight(ReadableWeight, Protocol):
    """A tensor of the files, with its scales if it is quantised; the data stay in the mapped files."""

    @property
    def quantization(self) -> str | None:
        """The name of the format of quantised values, such as FP8."""

    @property
    def nbytes(self) -> int:
        """The stored bytes."""


@dataclass(frozen=True)
class PlainWeight:
    """A tensor whose elements are the weights."""

    values: Tensor
    quantization = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def read(self, index: Index, out: Tensor) -> None:
        part = self.values[index]
        if part.dim() < 3 or out.is_contiguous():
            out.copy_(part)
            return
        for matrix, target in zip(part, out, strict=True):
            # Transposing a contiguous matrix takes half the time of reading its columns.
            target.T.copy_(matrix.contiguous().T)

    def whole(self) -> Tensor:
        return self.values


@dataclass(frozen=True)
class StackPlace:
    """The place of the matrices of one kind, gates, ups or downs, in a stack."""

    stack: str
    """The last part of the stack's name."""
    index: int
    """The place among the kinds of the stack."""
    kinds: int
    alternating: bool = False
    """Whether kinds alternate and matrices are transposed, as in gpt-oss, or kinds follow each other."""

    def stack_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the stack of matrices [E, rows, columns] or biases [E, rows] of a kind."""
        experts, rows, *columns = shape
        rows *= self.kinds
        return (experts, *columns, rows) if self.alternating else (experts, rows, *columns)

    def rows(self, stack_shape: Sequence[int]) -> range:
        """Return the places of the rows of the kind along their dimension of the stack."""
        if self.alternating:
            return range(self.index, stack_shape[-1], self.kinds)
        count = stack_shape[1] // self.kinds
        return range(self.index * count, (self.index + 1) * count)

    def view(self, stack: Tensor) -> Tensor:
        """Return the part of a stack, as a view [E, rows, columns] or [E, rows]."""
        rows = self.rows(stack.shape)
        if not self.alternating:
            return stack[:, rows.start : rows.stop]
        part = stack[..., rows.start :: rows.step]
        return part.mT if part.dim() == 3 else part

    def part_of(self, stored: StoredWeight) -> "StackPart":
        """Return the matrices or biases in a stored stack."""
        return StackPart(stored, self)


STACK_PLACES = {
    "gate_proj.weight": StackPlace("gate_up_proj", 0, 2),
    "up_proj.weight": StackPlace("gate_up_proj", 1, 2),
    "down_proj.weight": StackPlace("down_proj", 0, 1),
    "gate_proj.bias": StackPlace("gate_up_bias", 0, 2),
    "up_proj.bias": StackPlace("gate_up_bias", 1, 2),
    "down_proj.bias": StackPlace("down_bias", 0, 1),
}
"""Matrices and biases of experts -> their places in the stacks that transformers writes on request."""
ALTERNATING_PLACES = {
    "gate_proj.weight": StackPlace("gate_up_proj", 0, 2, alternating=True),
    "up_proj.weight": StackPlace("gate_up_proj", 1, 2, alternating=True),
    "down_proj.weight": StackPlace("down_proj", 0, 1, alternating=True),
    "gate_proj.bias": StackPlace("gate_up_proj_bias", 0, 2, alternating=True),
    "up_proj.bias": StackPlace("gate_up_proj_bias", 1, 2, alternating=True),
    "down_proj.bias": StackPlace("down_proj_bias", 0, 1, alternating=True),
}
"""Their places in the stacks of gpt-oss."""


@dataclass(frozen=True)
class StackPart:
    """The matrices [E, rows, columns], or the biases [E, rows], of one kind in a stack."""

    stack: StoredWeight
    place: StackPlace

    @property
    def shape(self) -> tuple[int, ...]:
        experts, *sizes = self.stack.shape
        columns = sizes[:-1] if self.place.alternating else sizes[1:]
        return (experts, len(self.place.rows(self.stack.shape)), *columns)

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    def read(self, index: Index, out: Tensor) -> None:
        experts, rows, *columns = index
        chosen = self.place.rows(self.stack.shape)[rows]
        places = slice(chosen.start, chosen.stop, chosen.step)
        if self.place.alternating and columns:
            self.stack.read((experts, *columns, places), out.mT)
        else:
            self.stack.read((experts, places, *columns), out)

    def whole(self) -> Tensor:
        return read_whole(self)


@dataclass(frozen=True)
class RowsPlace:
    """The place of the rows of a tensor in a stored one that has groups of rows of several."""

    first: int
    """First row in each group of the stored tensor."""
    count: int
    """Rows in each group."""
    group: int
    """Rows of the stored tensor in each group."""
    groups: int
    shape: tuple[int, ...]
    """That of the tensor. A stored convolution has another dimension, of size 1, after the rows."""

    def part_of(self, stored: StoredWeight) -> "RowsPart":
        """Return the rows in a stored tensor."""
        return RowsPart(stored, self)


@dataclass(frozen=True)
class RowsPart:
    """Some rows of a stored tensor, group by group."""

    stored: StoredWeight
    place: RowsPlace

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def read(self, index: Index, out: Tensor) -> None:
        place, (rows, *others) = self.place, index
        more = len(self.stored.shape) - len(place.shape)
        for group in range(rows.start // place.count, -(-rows.stop // place.count)):
            begin = max(rows.start, group * place.count)
            end = min(rows.stop, (group + 1) * place.count)
            offset = group * (place.group - place.count) + place.first
            target = out[begin - rows.start : end - rows.start]
            stored_rows = slice(begin + offset, end + offset)
            self.stored.read((stored_rows, *[slice(0, 1)] * more, *others), target.unsqueeze(1) if more else target)

    def whole(self) -> Tensor:
        return read_whole(self)


def read_whole(weight: ReadableWeight) -> Tensor:
    """Return the whole tensor in new memory."""
    out = torch.empty(weight.shape, dtype=weight.dtype)
    weight.read(tuple(slice(0, size) for size in weight.shape), out)
    return out
