"""Detects whether a resumed run reads the data, in the order, with which its checkpoint was trained."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_ladder.data.indexed import SAMPLED_BLOCKS, format_checksum, sampled_checksum
from megatron_ladder.data.loader import DataSource
from megatron_ladder.data.reading.hub import HubSource
from megatron_ladder.data.reading.protocol import Source

_TOTAL_BLOCKS = 1 << 13
"""Approximate number of blocks that are read of all files together; every rank reads them when it starts."""
_MAX_LISTED = 8
"""Changed sources that are listed one by one."""

# Entries of descriptions -> names in messages.
_TOKENIZER_LABELS = {"tokenizer_sha256": "--tokenizer-model: sha256"}
_STREAM_LABELS = {
    "streams": "--streaming-shards: the number of streams",
    "window_documents": "--streaming-shuffle-buffer: the number of documents in a shuffle buffer",
    "eod_id": "--tokenizer-model: the end-of-document token",
    "shards": "--streaming: the number of shards of the input",
}
_SOURCE_LABELS = {"name": "name", "files": "number of files", "bytes": "size in bytes", "sample": "checksum of blocks"}
_CONTENT_LABELS = {
    "documents": "number of documents",
    "tokens": "number of tokens",
    "dtype": "type of the tokens",
    "idx_checksum": "checksum of .idx",
    "bin_checksum": "checksum of .bin in the sidecar",
    "bin_sample": "checksum of blocks of .bin",
    "loss_mask_sample": "checksum of blocks of the loss mask",
}


def describe_training(source: DataSource, tokenizer_sha256: str | None) -> dict[str, Any]:
    """Return the description of the training data and its order that checkpoints store; JSON-able."""
    return {"tokenizer_sha256": tokenizer_sha256, "train": source.describe()}


def data_changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return one line per difference of a checkpoint's description, if it has one, and this run's."""
    try:
        return list(_differences(stored, found)) if stored else []
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return [f"the description of the data cannot be read ({error!r})"]


def _differences(stored: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    if "stream" in stored and "stream" in found:
        yield from _stream_changes(stored["stream"], found["stream"])
    elif "stream" in found:
        yield "--streaming: the data is streamed text, was token files (--data-path)"
    elif "stream" in stored:
        yield "--data-path: the data is token files, was streamed text (--streaming)"
    else:
        yield from _order_changes(stored["train"], found["train"])
    yield from _changes(_TOKENIZER_LABELS, stored, found)


def _changes(labels: Mapping[str, str], stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return one phrase per entry that differs."""
    return [
        f"{label} is {found.get(name)}, was {stored.get(name)}"
        for name, label in labels.items()
        if stored.get(name) != found.get(name)
    ]


def _stream_changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    was, now = stored["sources"], found["sources"]
    if len(was) != len(now):
        lines = [f"--streaming: the number of sources is {len(now)}, was {len(was)}"]
    else:
        pairs = [(new["name"], _changes(_SOURCE_LABELS, old, new)) for old, new in zip(was, now, strict=True)]
        lines = [f"--streaming {name}: {', '.join(changed)}" for name, changed in pairs if changed]
    if len(lines) > _MAX_LISTED:
        lines = [*lines[:_MAX_LISTED], f"--streaming: {len(lines) - _MAX_LISTED} more sources changed"]
    if lines:
        # The sources explain a different number of shards.
        found = found | {"shards": stored["shards"]}
    elif stored["shards_sha256"] != found["shards_sha256"] and stored["shards"] == found["shards"]:
        lines.append("--streaming: names or sizes of files have changed")
    return lines + _changes(_STREAM_LABELS, stored, found)


def _order_changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    if lines := _changes({"order": "--data-path: the order of samples"}, stored, found):
        return lines
    if len(stored["sets"]) != len(found["sets"]):
        was = " ".join(entry["prefix"] for entry in stored["sets"])
        return [f"--data-path: {len(found['sets'])} data sets, was {len(stored['sets'])}: {was}"]
    for old, new in zip(stored["sets"], found["sets"], strict=True):
        was, now = old["content"], new["content"]
        if None in (was["bin_checksum"], now["bin_checksum"]):
            # The checksum of a data set without a sidecar is unknown.
            now = now | {"bin_checksum": was["bin_checksum"]}
        changed = _changes(_CONTENT_LABELS, was, now)
        if not changed:
            changed = _changes({"documents": "--split: the range of training documents"}, old, new)
        changed += _changes({"weight": "weight"}, old, new)
        name = new["prefix"] if old["prefix"] == new["prefix"] else f"{new['prefix']} (was {old['prefix']})"
        lines += [f"{name}: {change}" for change in changed]
    return lines


def describe_sources(sources: Sequence[Source]) -> tuple[dict[str, Any], ...]:
    """Return the name, without directory, and a short description of the content of each streamed source; JSON-able.

    Blocks from all over each local file are read, fewer per file if there are many files. For files on the hub, the
    hub's own content hashes are used, so that a commit that does not touch them is not a change.
    """
    files = [source.data_files if isinstance(source, HubSource) else [source.name] for source in sources]
    blocks = max(2, min(SAMPLED_BLOCKS, _TOTAL_BLOCKS // max(1, sum(map(len, files)))))
    described = []
    for source, members in zip(sources, files, strict=True):
        contents = [_content_of_file(file, blocks) for file in members]
        entry: dict[str, Any] = {"name": Path(source.name).name, "files": len(members)}
        sizes = [size for size, _ in contents if size is not None]
        if len(sizes) == len(members):
            entry["bytes"] = sum(sizes)
        if members and all(sample is not None for _, sample in contents):
            names = [_name_in(Path(source.path), file) if isinstance(source, HubSource) else "" for file in members]
            samples = [(name, sample) for name, (_, sample) in zip(names, contents, strict=True)]
            entry["sample"] = format_checksum(xxhash.xxh3_128(repr(samples).encode()))
        described.append(entry)
    return tuple(described)


def _name_in(folder: Path, file: str) -> str:
    path = Path(file).absolute()
    if path.is_file():
        inside = [base for base in (folder.absolute(), folder.resolve()) if path.is_relative_to(base)]
        return str(path.relative_to(inside[0])) if inside else path.name
    # An address on the hub contains the commit.
    return re.sub(r"^(hf://.*?)@[^/]+", r"\1", file)


def _content_of_file(file: str, blocks: int) -> tuple[int | None, str | None]:
    """Return the size in bytes and a checksum, as far as they are known."""
    path = Path(file)
    if path.is_file():
        size = path.stat().st_size
        content = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
        return size, sampled_checksum(content, blocks)
    import fsspec

    system, place = fsspec.core.url_to_fs(file)
    info = system.info(place)
    known = [info[name] for name in ("blob_id", "ETag", "etag") if info.get(name)]
    return info.get("size"), str(known[0]) if known else None
