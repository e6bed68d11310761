"""Several indexed data sets copied into one, in their order, documents as they are."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_ladder.data.files import publish, temporary_beside
from megatron_ladder.data.indexed import (
    Checksums,
    IndexedDataset,
    IndexedDatasetWriter,
    bin_path,
    idx_path,
    loss_mask_path,
)
from megatron_ladder.data.sidecar import Sidecar, check_index, missing_loss_mask, sidecar_path, write_sidecar
from megatron_ladder.errors import UserError

PROGRESS_SECONDS = 1.0
MASK_BLOCK = 1 << 24

COMBINED: dict[str, Callable[[list[Any]], Any]] = {
    "documents": sum,
    "tokens": sum,
    "skipped": sum,
    "largest_id": max,
    "append_eod": all,
}
"""How a sidecar's entry follows from those of the parts; checksums are taken anew, and all others must agree."""


def find_inputs(paths: Sequence[Path]) -> list[Path]:
    """The prefixes that are meant: of a folder all data sets in it by name, otherwise the path itself.

    Raises:
        UserError: a folder without data sets, or with half of one.
    """
    prefixes: list[Path] = []
    mistakes: list[str] = []
    for path in paths:
        if not path.is_dir():
            prefixes.append(path)
            continue
        indexed = {entry.with_suffix("") for entry in path.glob("*.idx")}
        masks = {loss_mask_path(prefix) for prefix in indexed}
        with_tokens = {entry.with_suffix("") for entry in path.glob("*.bin") if entry not in masks}
        mistakes += [f"--input {bin_path(prefix)}: its .idx is missing" for prefix in sorted(with_tokens - indexed)]
        mistakes += [f"--input {idx_path(prefix)}: its .bin is missing" for prefix in sorted(indexed - with_tokens)]
        if not indexed | with_tokens:
            mistakes.append(f"--input {path}: holds no data set")
        prefixes += sorted(indexed & with_tokens)
    twice = sorted({prefix for prefix in prefixes if prefixes.count(prefix) > 1})
    mistakes += [f"--input {prefix}: is named twice" for prefix in twice]
    if mistakes:
        raise UserError(*mistakes)
    return prefixes


def merge_datasets(prefixes: Sequence[Path], output_prefix: Path, report: Callable[[str], None]) -> tuple[int, int]:
    """Writes `<output_prefix>.bin` and `.idx`; a loss mask if a part has one, a sidecar if all have one.

    Args:
        report: takes progress lines, PROGRESS_SECONDS apart at least.

    Returns:
        Documents and tokens.

    Raises:
        UserError: parts that are damaged, or do not go together; an output that exists. No file is left then.
    """
    datasets, sidecars = _open_all(prefixes, output_prefix)
    progress = _Progress(sum(dataset.tokens.nbytes for dataset in datasets), report)
    dtype = datasets[0].tokens.dtype
    with ExitStack() as stack:
        try:
            writer = stack.enter_context(IndexedDatasetWriter(output_prefix, dtype))
        except OSError as error:
            raise UserError(f"--output-prefix {output_prefix}: cannot be written: {error.strerror}") from None
        for dataset, sidecar in zip(datasets, sidecars, strict=True):
            checksum = writer.append(dataset, progress.advance)
            if sidecar is not None and sidecar.bin_checksum not in (None, checksum):
                raise UserError(
                    f"{bin_path(dataset.prefix)}: checksum {checksum} found, {sidecar.bin_checksum} expected by its "
                    "sidecar: the tokens are damaged: copy or preprocess the data again"
                )
        mask_checksum = _merge_loss_masks(datasets, sidecars, output_prefix)
        checksums = writer.publish()
    known = [sidecar for sidecar in sidecars if sidecar is not None]
    if len(known) == len(datasets):
        write_sidecar(output_prefix, _combine(known, checksums, mask_checksum))
    else:
        report(f"{output_prefix}: without .json, since {len(datasets) - len(known)} of the parts have none")
    progress.show()
    return sum(map(len, datasets)), sum(len(dataset.tokens) for dataset in datasets)


def _open_all(
    prefixes: Sequence[Path], output_prefix: Path
) -> tuple[list[IndexedDataset], list[Sidecar | None]]:
    mistakes = [
        f"--output-prefix {path}: exists: delete it, or give another name"
        for path in (output(output_prefix) for output in (bin_path, idx_path, loss_mask_path, sidecar_path))
        if path.exists()
    ]
    datasets: list[IndexedDataset] = []
    sidecars: list[Sidecar | None] = []
    for prefix in prefixes:
        try:
            dataset = IndexedDataset(prefix)
            sidecar = check_index(dataset)
            missing = missing_loss_mask(dataset, sidecar)
            if missing is not None:
                raise UserError(f"--input {missing}: copy it as well: without it every token would count")
            datasets.append(dataset)
            sidecars.append(sidecar)
        except UserError as error:
            mistakes.extend(error.mistakes)
    mistakes += [
        f"--input {dataset.prefix}: holds {dataset.tokens.dtype}, {datasets[0].prefix} {datasets[0].tokens.dtype}: "
        "preprocess them with one tokenizer"
        for dataset in datasets
        if dataset.tokens.dtype != datasets[0].tokens.dtype
    ]
    known = [(dataset.prefix, sidecar) for dataset, sidecar in zip(datasets, sidecars, strict=True) if sidecar]
    for prefix, sidecar in known[1:]:
        mistakes += [
            f"--input {prefix}: {name} is {getattr(sidecar, name)}, of {known[0][0]} {getattr(known[0][1], name)}: "
            "data sets are merged only if one tokenizer made them in one way"
            for name in _agreeing()
            if getattr(sidecar, name) != getattr(known[0][1], name)
        ]
    if mistakes:
        raise UserError(*mistakes)
    return datasets, sidecars


def _agreeing() -> list[str]:
    """Entries of a sidecar that are the same in all parts."""
    names = [field.name for field in dataclasses.fields(Sidecar)]
    return [name for name in names if name not in COMBINED and not name.endswith("_checksum")]


def _combine(sidecars: Sequence[Sidecar], checksums: Checksums, mask_checksum: str | None) -> Sidecar:
    names = [field.name for field in dataclasses.fields(Sidecar) if field.name in COMBINED]
    combined = {name: COMBINED[name]([getattr(sidecar, name) for sidecar in sidecars]) for name in names}
    return dataclasses.replace(
        sidecars[0],
        bin_checksum=checksums.bin,
        idx_checksum=checksums.idx,
        loss_mask_checksum=mask_checksum,
        **combined,
    )


def _merge_loss_masks(
    datasets: Sequence[IndexedDataset], sidecars: Sequence[Sidecar | None], output_prefix: Path
) -> str | None:
    """Publishes the joined masks, before there is an index that they could belong to; in a part without all count.

    Returns:
        Their checksum; None where no part has one.
    """
    if all(dataset.loss_mask is None for dataset in datasets):
        return None
    path = loss_mask_path(output_prefix)
    temporary = temporary_beside(path)
    whole = xxhash.xxh3_128()
    try:
        with open(temporary, "xb") as file:
            for dataset, sidecar in zip(datasets, sidecars, strict=True):
                mask, own = dataset.loss_mask, xxhash.xxh3_128()
                for begin in range(0, len(dataset.tokens), MASK_BLOCK):
                    size = min(MASK_BLOCK, len(dataset.tokens) - begin)
                    block = np.ones(size, np.uint8) if mask is None else mask[begin : begin + size]
                    file.write(block.data)
                    whole.update(block.data)
                    own.update(block.data)
                found, expected = f"xxh3_128:{own.hexdigest()}", sidecar and sidecar.loss_mask_checksum
                if expected not in (None, found):
                    raise UserError(
                        f"{loss_mask_path(dataset.prefix)}: checksum {found} found, {expected} expected by its "
                        "sidecar: the loss mask is damaged: copy or preprocess the data again"
                    )
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return f"xxh3_128:{whole.hexdigest()}"


class _Progress:
    """Lines that say how far the copy is and how long it takes still."""

    def __init__(self, total: int, report: Callable[[str], None]) -> None:
        self._total, self._report = total, report
        self._done = 0
        self._begun = self._shown = time.monotonic()

    def advance(self, size: int) -> None:
        """Counts bytes, and shows a line when one is due."""
        self._done += size
        if time.monotonic() - self._shown >= PROGRESS_SECONDS:
            self.show()

    def show(self) -> None:
        """One line."""
        self._shown = time.monotonic()
        rate = self._done / max(self._shown - self._begun, 1e-3)
        minutes, seconds = divmod(round((self._total - self._done) / rate), 60)
        self._report(
            f"copied {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB | {rate / 1e6:,.0f} MB/s "
            f"| ETA {minutes}:{seconds:02d}"
        )
