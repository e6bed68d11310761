"""The input of a streamed run, divided into shards that can be read concurrently.

The division depends only on the input, never on the number of streams or ranks. An uncompressed file of JSON lines is
divided into ranges of whole lines, a Parquet file into row groups, a data set of the `datasets` library into its own
shards; any other file is one shard. If there are many files, each file is one shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ladder.data.identity import describe_sources
from megatron_ladder.data.reading.find import find_sources
from megatron_ladder.data.reading.protocol import BadRecord, FileSource, Reading, Shard
from megatron_ladder.data.streaming import ShardBlock, TextShard
from megatron_ladder.errors import UserError

_ENOUGH_SHARDS = 256
"""Files are divided if there are fewer files than this."""
_COMPARED_FILES = 4
"""Files of which every host compares the size with that on the host of rank 0."""
_MIN_BYTES = 1 << 12
"""Approximate minimum size of a part of a file of lines."""


@dataclass(frozen=True)
class _FoundShard:
    name: str
    shard: Shard
    reading: Reading

    def blocks(self, first: int) -> Iterator[ShardBlock]:
        for block in self.shard.blocks(self.reading, first):
            parsed = block.read(self.reading)
            bad = [BadRecord(number, f"{block.place(number)}: {reason}") for number, reason in parsed.bad]
            yield ShardBlock(parsed.columns[0], tuple(bad))


@dataclass(frozen=True)
class _NamedShard:
    """A shard of which only the name is known, until rank 0 sends it through the process group."""

    name: str

    def blocks(self, first: int) -> Iterator[ShardBlock]:
        raise RuntimeError(f"{self.name}: read before rank 0 has sent it")


class StreamInput(NamedTuple):
    """The input of a streamed run; its shards are picklable, so that one rank looks for all.

    `sources` are described by `describe_sources`. `files` are some local files with their sizes.
    """

    shards: tuple[TextShard, ...]
    sources: tuple[dict[str, Any], ...]
    files: tuple[tuple[Path, int], ...]

    def record(self) -> dict[str, Any]:
        """Return everything except the content of the shards, JSON-able."""
        names, files = [shard.name for shard in self.shards], [(str(path), size) for path, size in self.files]
        return {"shards": names, "sources": self.sources, "files": files}

    @staticmethod
    def from_record(record: dict[str, Any]) -> "StreamInput":
        """Return an input whose shards have only names."""
        files = tuple((Path(path), size) for path, size in record["files"])
        return StreamInput(tuple(map(_NamedShard, record["shards"])), tuple(record["sources"]), files)

    def check_files(self) -> None:
        """Raise UserError if this host has other files than the one that looked."""
        for path, expected in self.files:
            try:
                found = f"has {path.stat().st_size} bytes"
            except OSError as error:
                found = f"cannot be read: {error.strerror}"
            if found != f"has {expected} bytes":
                raise UserError(
                    f"--streaming {path}: {found}, and {expected} bytes on the host of rank 0: give all hosts the same "
                    "files"
                )


def find_input(inputs: Sequence[str], key: str, max_bad: int = 0) -> StreamInput:
    """Return the input of arguments such as those of preprocess_data.py's --input.

    Up to `max_bad` unreadable records are skipped. Raises UserError for an argument that cannot be read repeatedly.
    """
    if "-" in inputs:
        raise UserError("--streaming -: standard input cannot be read again by a resumed run: give files")
    reading = Reading(
        (key,), True, max_bad=max_bad, input_flag="--streaming", keys_flag="--streaming-key", size_flag=None
    )
    sources = find_sources(inputs, reading)
    part = None
    if len(sources) < _ENOUGH_SHARDS:
        part = max(_MIN_BYTES, sum(source.total_bytes or 0 for source in sources) // _ENOUGH_SHARDS)
    shards = tuple(
        _FoundShard(shard.label, shard, reading) for source in sources for shard in source.shards(reading, part)
    )
    local = [source for source in sources if isinstance(source, FileSource)]
    some = local[:: -(-len(local) // _COMPARED_FILES) or 1]
    return StreamInput(shards, describe_sources(sources), tuple((source.path, source.total_bytes) for source in some))
