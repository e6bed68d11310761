"""Carries out conversions: report, check, copy, write the small files, verify, publish.

A conversion writes whole tensors, cast and in a new order where requested:

    for each file: read its tensors, save them under a temporary name, fsync, rename

One file is in memory at a time. A conversion that is started again skips the files that have their names.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_ladder.checkpoint.tensor_file import all_finite, equal_bits
from megatron_ladder.convert.options import ConversionOptions
from megatron_ladder.convert.outputs import check_space
from megatron_ladder.errors import Problem, UserError, counted, describe_full_disk, size_text
from megatron_ladder.files import TEMPORARY_SUFFIX, atomic_writer, write_atomically
from megatron_ladder.progress import ProgressBar


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
    source: str
    """For messages."""
    read: Callable[[], Tensor]
    """Returns the tensor as it is stored; raises UserError."""
    order: Permutation | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor in the file."""
        return int(np.prod(self.shape)) * getattr(torch, self.dtype).itemsize

    def load(self) -> Tensor:
        """Return the tensor as it is written.

        Raises UserError if the source cannot be read, or has a number that is not finite or does not fit in the type.
        """
        stored = self.read()
        if self.order is not None:
            stored = stored.index_select(self.order.dim, torch.from_numpy(self.order.source))
        if self.kind == "weight" and not all_finite(stored):
            raise UserError(f"{self.source}: contains NaN or infinity")
        cast = stored.to(getattr(torch, self.dtype))
        if cast.dtype != stored.dtype and cast.isinf().any():
            largest = f"the value {float(stored.abs().max()):.3g} does not fit in {self.dtype}"
            reason = "{source}: {largest}; choose another {dtype}"
            raise UserError(Problem({}, reason, source=self.source, largest=largest))
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
    return sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)


@dataclass(frozen=True)
class Conversion:
    """A conversion whose input and target were checked.

    `work` is the temporary directory next to the target; `facts` and `notes` are lines and warnings for the user.
    """

    files: Files
    work: Path
    target: Path
    small_files: Callable[[Path], Mapping[str, bytes]]
    """The temporary directory with the files of tensors -> the other files by name, in the order of writing."""
    publish: Callable[[Path], Path]
    """The complete temporary directory -> the published directory."""
    facts: Sequence[str]
    notes: Sequence[str] = ()
    made_of: str = "their sources"
    """What the tensors must be equal to, for --verify."""
    verify_source: Callable[[], None] = lambda: None
    """Raises UserError if files of the source are damaged."""
    check_logits: Callable[[Path], str] | None = None
    """The complete temporary directory -> a line about logits; for --verify."""


def carry_out(conversion: Conversion, options: ConversionOptions, report: Callable[[str], None]) -> None:
    """Execute a conversion, or with --dry-run only report it.

    Raises UserError if a source is damaged, can no longer be read, or has a weight that cannot be converted, or if
    there is no space; RuntimeError if verification failed.
    """
    began = time.monotonic()
    files = conversion.files
    work = conversion.work
    # The plan.
    for line in (*conversion.facts, *(f"*** {note} ***" for note in conversion.notes)):
        report(line)
    for name, tensors in files.items():
        report(f"  {name}: {size_text(total_bytes({name: tensors}))}, {counted(len(tensors), 'tensor')}")
    size = size_text(total_bytes(files))
    report(f"{size} in {counted(len(files), 'file')} -> {conversion.target}")
    if options.dry_run:
        report("nothing was written (dry run)")
        return
    # Its execution.
    continued = work.exists()
    is_new_folder = not work.parent.exists()
    if not continued:
        check_space(conversion.target, total_bytes(files))
    try:
        conversion.verify_source()
        work.mkdir(parents=True, exist_ok=True)
        if continued:
            report(f"continues an interrupted conversion in {work}")
        _write_files(files, work)
        for name, content in conversion.small_files(work).items():
            write_atomically(work / name, content)
        if options.verify:
            _verify_files(files, work)
            count = sum(map(len, files.values()))
            report(f"verified: all {count} tensors are bitwise equal to {conversion.made_of}")
            if conversion.check_logits is not None:
                report(conversion.check_logits(work))
        published = conversion.publish(work)
    except UserError:
        # No source that can be converted has the same plan.
        shutil.rmtree(work, ignore_errors=True)
        if is_new_folder:
            # Another conversion may have begun in it.
            with suppress(OSError):
                work.parent.rmdir()
        raise
    except (OSError, SafetensorError) as error:
        reason = describe_full_disk(error) or f"{getattr(error, 'strerror', None) or error}; run the same command again"
        raise UserError(f"{work}: {reason} to continue") from error
    report(f"wrote {size} in {time.monotonic() - began:.1f} s")
    report(f"wrote {published}")


def _write_files(files: Files, directory: Path) -> None:
    """Write the files that an earlier, interrupted conversion has not completed."""
    for partial in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        partial.unlink()
    with ProgressBar("copying", total_bytes(files)) as progress:
        for name, tensors in files.items():
            if not (directory / name).exists():
                loaded = {tensor.key: tensor.load() for tensor in tensors}
                with atomic_writer(directory / name) as file:
                    save_file(loaded, file.name, metadata={"format": "pt"})
            progress.advance(sum(tensor.num_bytes for tensor in tensors))


def _verify_files(files: Files, directory: Path) -> None:
    """Read source and target again, and compare them bit by bit; raise RuntimeError if a file is wrong.

    It is removed: otherwise it would count as complete in the next attempt.
    """
    with ProgressBar("verifying", total_bytes(files)) as progress:
        for name, tensors in files.items():
            path = directory / name
            with safe_open(path, framework="pt") as file:
                same = all(equal_bits(file.get_tensor(tensor.key), tensor.load()) for tensor in tensors)
            if not same:
                path.unlink()
                raise RuntimeError(f"{path}: differs from its source; removed: the same command writes it again")
            progress.advance(sum(tensor.num_bytes for tensor in tensors))
