"""What the sources of streamed texts hold, in a few numbers, so that a resumed run can tell whether its positions still
point at the same documents."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_ladder.data.indexed import SAMPLED_BLOCKS, sampled_checksum
from megatron_ladder.data.reading.hub import HubSource
from megatron_ladder.data.reading.protocol import Source

BLOCKS_IN_ALL = 1 << 13
"""Of all files together, about: every rank reads them when it starts."""
MOST_NAMED = 8
"""Changed sources that are told one by one."""
MEANINGS = {"files": "number of files", "bytes": "size in bytes", "sample": "checksum of blocks"}
"""Of what describe_sources says, for messages."""


def describe_sources(sources: Sequence[Source]) -> tuple[dict[str, Any], ...]:
    """Of each source its name, without the folder, and what it holds, wherever it lies; JSON-able.

    Blocks from all over each local file are read, fewer of each where there are many files. Of files of the hub it is
    what the hub tells of their contents: a commit that leaves them alone is no change.
    """
    files = [_files_of(source) for source in sources]
    blocks = max(2, min(SAMPLED_BLOCKS, BLOCKS_IN_ALL // max(1, sum(map(len, files)))))
    return tuple(
        {"name": Path(source.name).name} | _describe_files(members, blocks)
        for source, members in zip(sources, files, strict=True)
    )


def source_changes(stored: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each source that differs. What one of two descriptions does not tell, says nothing."""
    if len(stored) != len(found):
        return [f"--streaming: the number of sources is {len(found)}, was {len(stored)}"]
    lines = list(_differences(stored, found))
    if len(lines) > MOST_NAMED:
        return [*lines[:MOST_NAMED], f"--streaming: {len(lines) - MOST_NAMED} more sources changed"]
    return lines


def _differences(stored: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> Iterator[str]:
    for number, (old, new) in enumerate(zip(stored, found, strict=True), start=1):
        if old["name"] != new["name"]:
            yield f"--streaming: source {number} is {new['name']}, was {old['name']}"
            continue
        changed = [name for name in MEANINGS if name in old and name in new and old[name] != new[name]]
        if changed:
            what = ", ".join(f"{MEANINGS[name]} is {new[name]}, was {old[name]}" for name in changed)
            yield f"--streaming {new['name']}: {what}"


def _files_of(source: Source) -> list[tuple[str, str]]:
    """Names, of which none has the folder of the source in it, and paths or addresses."""
    if not isinstance(source, HubSource):
        return [("", source.name)]
    return [(_name_in(Path(source.path), file), file) for file in source.data_files()]


def _name_in(folder: Path, file: str) -> str:
    path = Path(file).absolute()
    if path.is_file():
        inside = [base for base in (folder.absolute(), folder.resolve()) if path.is_relative_to(base)]
        return str(path.relative_to(inside[0])) if inside else path.name
    # An address of the hub names the commit.
    return re.sub(r"^(hf://.*?)@[^/]+", r"\1", file)


def _describe_files(files: Sequence[tuple[str, str]], blocks: int) -> dict[str, Any]:
    contents = [(name, *_content_of(file, blocks)) for name, file in files]
    sizes = [size for _, size, _ in contents]
    described: dict[str, Any] = {"files": len(files)}
    if None not in sizes:
        described["bytes"] = sum(size or 0 for size in sizes)
    if files and all(sample is not None for _, _, sample in contents):
        hasher = xxhash.xxh3_128(repr([(name, sample) for name, _, sample in contents]).encode())
        described["sample"] = f"xxh3_128:{hasher.hexdigest()}"
    return described


def _content_of(file: str, blocks: int) -> tuple[int | None, str | None]:
    """Size in bytes and a checksum, as far as they are known."""
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
