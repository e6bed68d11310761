"""Detects whether a resumed run reads the data, in the order, with which its checkpoint was trained."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_ladder.data.indexed import SAMPLED_BLOCKS, format_checksum, sampled_checksum
from megatron_ladder.data.reading.hub import HubSource
from megatron_ladder.data.reading.protocol import Source
from megatron_ladder.errors import Problem, limited
from megatron_ladder.tokenizers.kinds import same_tokenizer

_TOTAL_BLOCKS = 1 << 13
"""Approximate number of blocks that are read of all files together; every rank reads them when it starts."""
_TOKENIZER = "tokenizer_sha256"
_FIELDS = {"train": "data_path", "stream": "streaming", _TOKENIZER: "tokenizer_model"}
"""Keys of descriptions -> fields."""
_PARTS = {
    "documents": "documents",
    "tokens": "tokens",
    "dtype": "type of tokens",
    "idx_checksum": "documents",
    "bin_checksum": "tokens",
    "bin_sample": "tokens",
    "loss_mask_sample": "loss mask",
    "files": "files",
    "bytes": "size",
    "sample": "text",
}
"""Keys that describe the content of a data set or source -> the part that has changed if their values differ."""
_OTHERS = "{}: the checkpoint was trained with {theirs}"
_SHARDS = ("shards", "shards_sha256")
"""Keys that follow from the sources."""


def data_changes(stored: dict[str, Any], current: dict[str, Any]) -> list[str | Problem]:
    """Return one problem per difference of a checkpoint's description, if it has one, and this run's."""
    before, now = stored.get(_TOKENIZER), current.get(_TOKENIZER)
    if before is not None and now is not None and same_tokenizer(before, now):
        current = current | {_TOKENIZER: before}
    keys = dict.fromkeys((*stored, *current)) if stored else ()
    places = [(_FIELDS.get(key, key), stored.get(key), current.get(key)) for key in keys]
    return limited([problem for entry in places for problem in _differences(*entry)])


def _differences(field_name: str, stored: Any, current: Any) -> Iterator[Problem]:
    """Yield one problem per difference; that of two texts or numbers is one of tokenizers."""
    if not isinstance(stored, dict) or not isinstance(current, dict):
        if stored != current:
            yield Problem({field_name: None}, "{}: the checkpoint was trained with another one, or none")
        return
    members = "sets" if "sets" in current else "sources"
    of_members = [*_differences_of_members(field_name, stored.get(members) or (), current.get(members) or ())]
    yield from of_members
    for key in dict.fromkeys((*stored, *current)):
        was, now = stored.get(key), current.get(key)
        if key != members and was != now and not (of_members and key in _SHARDS):
            yield _describe_value({field_name: None}, key, was, now)


def _differences_of_members(
    field_name: str, stored: Sequence[dict[str, Any]], current: Sequence[dict[str, Any]]
) -> Iterator[Problem]:
    """Yield one problem per data set or source with another content, share or weight. Files of sets may have moved."""
    if len(stored) != len(current):
        ours, theirs = (" ".join(map(_name_of, members)) or "others" for members in (current, stored))
        yield Problem({field_name: ours}, _OTHERS, theirs=theirs)
        return
    for was, now in zip(stored, current, strict=True):
        old, new = _name_of(was), _name_of(now)
        contents = [entry.get("content", entry) for entry in (was, now)]
        changed = dict.fromkeys(part for key, part in _PARTS.items() if _differs(key, *contents))
        if old != new and (changed or "prefix" not in now):
            yield Problem({field_name: new}, _OTHERS, theirs=old)
        elif changed:
            yield Problem({field_name: new}, f"{{}}: {' and '.join(changed)} changed after the checkpoint")
        else:
            for key in [key for key in ("documents", "weight") if "content" in now and was.get(key) != now.get(key)]:
                yield _describe_value({field_name: new}, key, was.get(key), now.get(key))


def _name_of(member: dict[str, Any]) -> str:
    return str(member.get("prefix", member.get("name")))


def _differs(key: str, stored: dict[str, Any], current: dict[str, Any]) -> bool:
    was, now = stored.get(key), current.get(key)
    # The checksum of a data set without a sidecar is unknown.
    return was != now and not (key == "bin_checksum" and None in (was, now))


def _describe_value(fields: dict[str, str | None], key: str, was: Any, now: Any) -> Problem:
    reason = "{}: {key} {now}, in the checkpoint {was}"
    return Problem(fields, reason, key=key, now=f"{now!r:.200}", was=f"{was!r:.200}")


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

    system, location = fsspec.core.url_to_fs(file)
    info = system.info(location)
    known = [info[name] for name in ("blob_id", "ETag", "etag") if info.get(name)]
    return info.get("size"), str(known[0]) if known else None
