"""Detects whether a resumed run reads the data, in the order, with which its checkpoint was trained."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_ladder.data.indexed import SAMPLED_BLOCKS, format_checksum, sampled_checksum
from megatron_ladder.data.loader import DataSource
from megatron_ladder.data.reading.hub import HubSource
from megatron_ladder.data.reading.protocol import Source
from megatron_ladder.data.sidecar import content_changes

_TOTAL_BLOCKS = 1 << 13
"""Approximate number of blocks that are read of all files together; every rank reads them when it starts."""
_MAX_LISTED = 8
"""Changed sources that are listed one by one."""

_EARLIER_NAMES = ("train_documents", "train_tokens", "tokenizer_sha256")
"""Everything that the oldest checkpoints record about their data."""

# Entries of descriptions -> names in messages.
_EARLIER_LABELS = {name: f"--data-path or --tokenizer-model: {name}" for name in _EARLIER_NAMES}
_STREAM_LABELS = {
    "streams": "--streaming-shards: the number of streams",
    "window_documents": "--streaming-shuffle-buffer: the number of documents in a shuffle buffer",
    "eod_id": "--tokenizer-model: the end-of-document token",
    "shards": "--streaming: the number of shards of the input",
}
_SOURCE_LABELS = {"files": "number of files", "bytes": "size in bytes", "sample": "checksum of blocks"}


def describe_training(source: DataSource, tokenizer_sha256: str | None) -> dict[str, Any]:
    """Return the description of the training data and its order that checkpoints store; JSON-able."""
    return {
        "train_documents": sum(len(member.documents) for member in source.sources),
        "train_tokens": sum(member.tokens for member in source.sources),
        "tokenizer_sha256": tokenizer_sha256,
        "train": source.describe(),
    }


def data_changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return one line per difference of a checkpoint's description, which may lack entries, and this run's."""
    try:
        return _differences(stored, found)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return [f"the description of the data cannot be read ({error!r})"]


def _differences(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    if "stream" in stored or "stream" in found:
        return _stream_changes(stored, found)
    if "train" not in stored:
        return _changes(_EARLIER_LABELS, stored, found)
    lines = _order_changes(stored["train"], found["train"])
    return lines + _changes({"tokenizer_sha256": _EARLIER_LABELS["tokenizer_sha256"]}, stored, found)


def _changes(labels: Mapping[str, str], stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return one phrase per entry that differs. Entries that an earlier release did not record are not compared."""
    return [
        f"{label} is {found[name]}, was {stored[name]}"
        for name, label in labels.items()
        if name in stored and name in found and stored[name] != found[name]
    ]


def _stream_changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    if "stream" not in stored:
        return ["--streaming: the data is streamed text, was token files (--data-path)"]
    if "stream" not in found:
        return ["--data-path: the data is token files, was streamed text (--streaming)"]
    was, now = stored["stream"], found["stream"]
    lines = _source_changes(was["sources"], now["sources"]) if "sources" in was else []
    if lines:
        # The sources explain a different number of shards.
        now = {name: value for name, value in now.items() if name != "shards"}
    elif was.get("shards_sha256") != now["shards_sha256"] and was.get("shards") == now["shards"]:
        lines.append("--streaming: names or sizes of files have changed")
    lines += _changes(_STREAM_LABELS, was, now)
    return lines + _changes({"tokenizer_sha256": "--tokenizer-model: sha256"}, stored, found)


def _source_changes(stored: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[str]:
    if len(stored) != len(found):
        return [f"--streaming: the number of sources is {len(found)}, was {len(stored)}"]
    lines = []
    for number, (old, new) in enumerate(zip(stored, found, strict=True), start=1):
        if old["name"] != new["name"]:
            lines.append(f"--streaming: source {number} is {new['name']}, was {old['name']}")
        elif changed := _changes(_SOURCE_LABELS, old, new):
            lines.append(f"--streaming {new['name']}: {', '.join(changed)}")
    if len(lines) > _MAX_LISTED:
        return [*lines[:_MAX_LISTED], f"--streaming: {len(lines) - _MAX_LISTED} more sources changed"]
    return lines


def _order_changes(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    if stored["order"] != found["order"]:
        return [f"--megatron-order: the order of samples is {found['order']!r}, was {stored['order']!r}"]
    if stored.get("run_samples") != found.get("run_samples"):
        return [
            f"--train-iters, --global-batch-size: the run reads {found.get('run_samples')} samples, was "
            f"{stored.get('run_samples')}, and --megatron-order depends on this number"
        ]
    if len(stored["sets"]) != len(found["sets"]):
        was = " ".join(entry["prefix"] for entry in stored["sets"])
        return [f"--data-path: {len(found['sets'])} data sets, was {len(stored['sets'])}: {was}"]
    lines = []
    for old, new in zip(stored["sets"], found["sets"], strict=True):
        changed = content_changes(old["content"], new["content"])
        if old["documents"] != new["documents"] and not changed:
            changed.append(f"--split: training documents are {new['documents']}, was {old['documents']}")
        if old.get("weight") != new.get("weight"):
            changed.append(f"weight is {new.get('weight')}, was {old.get('weight')}")
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
