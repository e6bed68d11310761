"""The files of tensors that a conversion writes: whole tensors, cast and in a new order where requested.

    for each file: read its tensors, save them under a temporary name, fsync, rename

One file is in memory at a time. A conversion that is started again skips the files that have their names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_ladder.errors import UserError
from megatron_ladder.files import atomic_writer
from megatron_ladder.progress import ProgressBar


class UnusableNumberError(UserError):
    """A weight is not finite, or does not fit in the new element type."""


class Permutation(NamedTuple):
    """A new order of the rows (`dim` 0) or columns (1) of a tensor: row i of the result is row `source[i]`."""

    dim: int
    source: NDArray[np.int64]


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor of a file that is to be written, and how its source is read; element types have torch's names."""

    key: str
    """In the file."""
    name: str
    """The canonical name."""
    kind: str
    shape: tuple[int, ...]
    dtype: str
    stored_dtype: str
    source: str
    """For messages."""
    read: Callable[[Tensor], None]
    """Fills a tensor [*shape] of `stored_dtype`; raises UserError."""
    order: Permutation | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor in the file."""
        return int(np.prod(self.shape)) * _dtype(self.dtype).itemsize

    def load(self) -> Tensor:
        """Return the tensor as it is written.

        Raises:
            UserError: the source cannot be read.
            UnusableNumberError: a weight is not finite, or a number does not fit in the new element type.
        """
        stored = torch.empty(self.shape, dtype=_dtype(self.stored_dtype))
        self.read(stored)
        if self.order is not None:
            stored = stored.index_select(self.order.dim, torch.from_numpy(self.order.source))
        if self.kind == "weight" and not stored.isfinite().all():
            raise UnusableNumberError(f"{self.source}: contains NaN or infinity")
        cast = stored.to(_dtype(self.dtype))
        if cast.dtype != stored.dtype and cast.isinf().any():
            largest = f"the value {float(stored.abs().max()):.3g} does not fit in {self.dtype}"
            raise UnusableNumberError(f"{self.source}: {largest}; choose another --dtype")
        return cast


Files = Mapping[str, Sequence[CopiedTensor]]
"""File name -> the tensors that are to be written to it."""


def divide(tensors: Iterable[CopiedTensor], most_bytes: int) -> list[list[CopiedTensor]]:
    """Divide tensors, in their order, into files; a tensor larger than `most_bytes` has a separate file."""
    shards: list[list[CopiedTensor]] = []
    filled = 0
    for tensor in tensors:
        if not shards or filled + tensor.num_bytes > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def total_bytes(files: Files) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)


def write_files(files: Files, directory: Path) -> None:
    """Write the files that an earlier, interrupted conversion has not completed.

    Raises:
        UserError: as `CopiedTensor.load`.
        OSError, SafetensorError: writing fails.
    """
    with ProgressBar("copying", total_bytes(files)) as progress:
        for name, tensors in files.items():
            if not (directory / name).exists():
                loaded = {tensor.key: tensor.load() for tensor in tensors}
                with atomic_writer(directory / name) as file:
                    save_file(loaded, file.name, metadata={"format": "pt"})
            progress.advance(sum(tensor.num_bytes for tensor in tensors))


def verify_files(files: Files, directory: Path) -> None:
    """Read source and target again, and compare them bit by bit.

    A wrong file is removed: otherwise it would count as complete when the same conversion is started again.

    Raises:
        UserError: a source cannot be read.
        RuntimeError: files are wrong; the message has the first wrong tensor of each.
    """
    wrong = []
    with ProgressBar("verifying", total_bytes(files)) as progress:
        for name, tensors in files.items():
            if (problem := _first_difference(directory / name, tensors)) is not None:
                wrong.append(problem)
                (directory / name).unlink()
            progress.advance(sum(tensor.num_bytes for tensor in tensors))
    if wrong:
        raise RuntimeError("; ".join([*wrong, "removed; the same command writes these files again"]))


def _first_difference(path: Path, tensors: Sequence[CopiedTensor]) -> str | None:
    try:
        with safe_open(path, framework="pt") as file:
            for tensor in tensors:
                found, expected = file.get_tensor(tensor.key), tensor.load()
                same = found.dtype == expected.dtype and found.shape == expected.shape
                if not (same and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))):
                    return f"{path}: {tensor.key} differs from its source"
    except (OSError, SafetensorError) as error:
        return f"{path}: cannot be read: {error}"
    return None


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
