"""Merges indexed data sets into one, in order, without changing documents."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_ladder.data.indexed import (
    IndexedDataset,
    IndexedDatasetWriter,
    bin_path,
    format_checksum,
    idx_path,
    loss_mask_path,
    sidecar_path,
)
from megatron_ladder.data.sidecar import (
    Sidecar,
    check_index,
    checksum_errors,
    missing_loss_mask,
    write_sidecar,
)
from megatron_ladder.errors import ErrorCollector, UserError, raise_user_errors
from megatron_ladder.files import atomic_writer
from megatron_ladder.progress import ProgressBar

_MASK_BLOCK = 1 << 24

_COMBINED: dict[str, Callable[[list[Any]], Any]] = {
    "documents": sum,
    "tokens": sum,
    "skipped": sum,
    "largest_id": max,
    "append_eod": all,
}
"""Entry of the sidecar -> function of the parts' entries. Checksums are computed; all other entries must agree."""


def find_inputs(paths: Sequence[Path]) -> list[Path]:
    """Return each path, or the sorted prefixes in a directory; raises UserError for incomplete or repeated ones."""
    prefixes: list[Path] = []
    errors = ErrorCollector()
    for path in paths:
        if not path.is_dir():
            prefixes.append(path)
            continue
        indexed = {entry.with_suffix("") for entry in path.glob("*.idx")}
        masks = {loss_mask_path(prefix) for prefix in indexed}
        with_tokens = {entry.with_suffix("") for entry in path.glob("*.bin") if entry not in masks}
        errors.add(*(f"--input {bin_path(prefix)}: its .idx is missing" for prefix in sorted(with_tokens - indexed)))
        errors.add(*(f"--input {idx_path(prefix)}: its .bin is missing" for prefix in sorted(indexed - with_tokens)))
        if not indexed | with_tokens:
            errors.add(f"--input {path}: contains no data set")
        prefixes += sorted(indexed & with_tokens)
    errors.add(*(f"--input {prefix}: is given twice" for prefix in prefixes if prefixes.count(prefix) > 1))
    errors.raise_if_any()
    return prefixes


def merge_datasets(prefixes: Sequence[Path], output_prefix: Path, report: Callable[[str], None]) -> tuple[int, int]:
    """Write the data set and its sidecar and loss mask, as far as the parts have them; return its documents and tokens.

    Raises UserError, and leaves no file, for parts that are damaged or incompatible, or an output that exists.
    """
    datasets, sidecars = _open_all(prefixes, output_prefix)
    try:
        _write_merged(datasets, sidecars, output_prefix, report)
    except OSError as error:
        # `_open_all` has found none of these files.
        for path_of in (loss_mask_path, bin_path, idx_path, sidecar_path):
            path_of(output_prefix).unlink(missing_ok=True)
        raise UserError(f"--output-prefix {output_prefix}: cannot be written: {error.strerror}") from None
    return sum(map(len, datasets)), sum(len(dataset.tokens) for dataset in datasets)


def _write_merged(
    datasets: Sequence[IndexedDataset],
    sidecars: Sequence[Sidecar | None],
    output_prefix: Path,
    report: Callable[[str], None],
) -> None:
    dtype = datasets[0].tokens.dtype
    with ExitStack() as stack:
        bar = stack.enter_context(ProgressBar("copied", sum(dataset.tokens.nbytes for dataset in datasets)))
        writer = stack.enter_context(IndexedDatasetWriter(output_prefix, dtype))
        for dataset, sidecar in zip(datasets, sidecars, strict=True):
            checksum = writer.append(dataset, bar.advance)
            raise_user_errors(checksum_errors(bin_path(dataset.prefix), checksum, sidecar, "bin_checksum"))
        mask_checksum = _merge_loss_masks(datasets, sidecars, output_prefix)
        bin_checksum, idx_checksum = writer.publish()
    known = [sidecar for sidecar in sidecars if sidecar is not None]
    if len(known) == len(datasets):
        values = {name: rule([getattr(sidecar, name) for sidecar in known]) for name, rule in _COMBINED.items()}
        values |= {"bin_checksum": bin_checksum, "idx_checksum": idx_checksum, "loss_mask_checksum": mask_checksum}
        write_sidecar(output_prefix, dataclasses.replace(known[0], **values))
    else:
        report(f"{output_prefix}: has no .json, because {len(datasets) - len(known)} of the parts have none")


def _open_all(prefixes: Sequence[Path], output_prefix: Path) -> tuple[list[IndexedDataset], list[Sidecar | None]]:
    errors = ErrorCollector()
    outputs = [path_of(output_prefix) for path_of in (bin_path, idx_path, loss_mask_path, sidecar_path)]
    existing = [path for path in outputs if path.exists()]
    errors.add(*(f"--output-prefix {path}: exists: delete it, or give another name" for path in existing))
    datasets: list[IndexedDataset] = []
    sidecars: list[Sidecar | None] = []
    for prefix in prefixes:
        with errors.collect("--input"):
            dataset = IndexedDataset(prefix)
            sidecar = check_index(dataset)
            missing = missing_loss_mask(dataset, sidecar)
            if missing is not None:
                raise UserError(f"{missing}: copy it as well: without it every token would count in the loss")
            datasets.append(dataset)
            sidecars.append(sidecar)
    for dataset in datasets:
        if dataset.tokens.dtype != datasets[0].tokens.dtype:
            errors.add(
                f"--input {dataset.prefix}: has tokens of {dataset.tokens.dtype}, {datasets[0].prefix} of "
                f"{datasets[0].tokens.dtype}: preprocess them with one tokenizer"
            )
    names = [field.name for field in dataclasses.fields(Sidecar)]
    agreeing = [name for name in names if name not in _COMBINED and not name.endswith("_checksum")]
    known = [(dataset.prefix, sidecar) for dataset, sidecar in zip(datasets, sidecars, strict=True) if sidecar]
    for prefix, sidecar in known[1:]:
        for name in agreeing:
            found, expected = getattr(sidecar, name), getattr(known[0][1], name)
            if found != expected:
                errors.add(
                    f"--input {prefix}: {name} is {found}, of {known[0][0]} {expected}: merge only data sets that one "
                    "tokenizer made with the same flags"
                )
    errors.raise_if_any()
    return datasets, sidecars


def _merge_loss_masks(
    datasets: Sequence[IndexedDataset], sidecars: Sequence[Sidecar | None], output_prefix: Path
) -> str | None:
    """Publish the merged masks before the index, and return their checksum; None if no part has a mask."""
    if all(dataset.loss_mask is None for dataset in datasets):
        return None
    whole = xxhash.xxh3_128()
    with atomic_writer(loss_mask_path(output_prefix)) as file:
        for dataset, sidecar in zip(datasets, sidecars, strict=True):
            mask, part = dataset.loss_mask, xxhash.xxh3_128()
            for begin in range(0, len(dataset.tokens), _MASK_BLOCK):
                dataset.check_size()
                size = min(_MASK_BLOCK, len(dataset.tokens) - begin)
                block = np.ones(size, np.uint8) if mask is None else mask[begin : begin + size]
                file.write(block.data)
                whole.update(block.data)
                part.update(block.data)
            path = loss_mask_path(dataset.prefix)
            raise_user_errors(checksum_errors(path, format_checksum(part), sidecar, "loss_mask_checksum"))
    return format_checksum(whole)
