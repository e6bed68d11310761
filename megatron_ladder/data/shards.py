"""The input of a streamed run, divided into shards that can be read concurrently.

The division depends only on the input, never on the number of streams or ranks. An uncompressed file of JSON lines is
divided into ranges of whole lines, a Parquet file into row groups, a data set of the `datasets` library into its own
shards; any other file is one shard. If there are many files, each file is one shard.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ladder.data.identity import describe_sources
from megatron_ladder.data.reading.files import HugeLine, JsonLinesFile, LineSpan, end_of_line, start_of_last_line
from megatron_ladder.data.reading.find import find_sources
from megatron_ladder.data.reading.hub import BATCH_ROWS, HubShard, HubSource
from megatron_ladder.data.reading.parquet import ParquetFile, RowGroup
from megatron_ladder.data.reading.protocol import SPAN_BYTES, BadRecord, Block, FileSource, Reading, Source
from megatron_ladder.data.streaming import Shard, ShardBlock
from megatron_ladder.errors import UserError

_ENOUGH_SHARDS = 256
"""Files are divided if there are fewer files than this."""
_COMPARED_FILES = 4
"""Files of which every host compares the size with that on the host of rank 0."""
_MIN_BYTES = 1 << 12
"""Approximate minimum size of a part of a file of lines."""
_LINES_COUNTED_BYTES = 1 << 30
"""After this much of a file, line numbers are not counted, which would take more than a second."""


@dataclass(frozen=True)
class _SourceShard:
    source: Source
    reading: Reading
    name: str

    @staticmethod
    def of(source: Source, reading: Reading) -> "_SourceShard":
        return _SourceShard(source, reading, f"{Path(source.name).name} {source.total_bytes}")

    def blocks(self, first: int) -> Iterator[ShardBlock]:
        if isinstance(self.source, HubShard):
            return _documents(self.source.blocks_from(first, self.reading), self.reading)
        return _documents(islice(self.source.blocks(self.reading), first, None), self.reading)

    def place(self, block: int, record: int) -> str:
        if isinstance(self.source, HubShard):
            return self.source.place(block * BATCH_ROWS + record)
        before = islice(self.source.blocks(self.reading), block)
        return self.source.place(sum(earlier.read(self.reading).records for earlier in before) + record)


@dataclass(frozen=True)
class _LinesShard:
    """The lines of a file whose first bytes are in begin .. end - 1."""

    path: Path
    begin: int
    end: int
    reading: Reading

    @property
    def name(self) -> str:
        return f"{self.path.name} {self.begin}-{self.end}"

    def blocks(self, first: int) -> Iterator[ShardBlock]:
        return _documents((span for _, span in islice(self._spans(), first, None)), self.reading)

    def place(self, block: int, record: int) -> str:
        begin, _ = next(islice(self._spans(), block, None))
        if begin > _LINES_COUNTED_BYTES:
            return f"{self.path}: line {record + 1} after byte {begin}"
        with open(self.path, "rb") as file:
            pieces = (file.read(min(SPAN_BYTES, begin - start)) for start in range(0, begin, SPAN_BYTES))
            lines = sum(piece.count(b"\n") for piece in pieces)
        return f"{self.path}:{lines + record + 1}"

    def _spans(self) -> Iterator[tuple[int, Block]]:
        """Yield blocks, each with its first byte."""
        with open(self.path, "rb") as file:
            # The previous line may be longer than the shard.
            begin = end_of_line(file, self.begin - 1, self.end) if self.begin else 0
            end = end_of_line(file, self.end - 1) if begin < self.end else begin
            while begin < end:
                following = min(end_of_line(file, begin + SPAN_BYTES - 1), end)
                if following - begin <= SPAN_BYTES + self.reading.max_bytes:
                    yield begin, LineSpan(self.path, begin, following)
                else:
                    last = start_of_last_line(file, begin)
                    if last > begin:
                        yield begin, LineSpan(self.path, begin, last)
                    yield last, HugeLine(following - last, following - last)
                begin = following


@dataclass(frozen=True)
class _RowGroupShard:
    """A row group of a Parquet file; its parts are the blocks."""

    parts: tuple[RowGroup, ...]
    reading: Reading

    @property
    def name(self) -> str:
        path, number = self.parts[0].path, self.parts[0].number
        size = sum(part.file_bytes for part in self.parts)
        return f"{path.name} {number} {size}" + (f" {len(self.parts)}" if len(self.parts) > 1 else "")

    def blocks(self, first: int) -> Iterator[ShardBlock]:
        return _documents(iter(self.parts[first:]), self.reading)

    def place(self, block: int, record: int) -> str:
        import pyarrow.parquet

        part = self.parts[block]
        metadata = pyarrow.parquet.read_metadata(part.path)
        before = sum(metadata.row_group(number).num_rows for number in range(part.number))
        return ParquetFile(part.path).place(before + part.rows.start + record)


def _documents(blocks: Iterator[Block], reading: Reading) -> Iterator[ShardBlock]:
    for block in blocks:
        parsed = block.read(reading)
        bad = tuple(BadRecord(record.number, _with_training_flags(record.reason)) for record in parsed.bad)
        yield ShardBlock(parsed.columns[0], bad)


@dataclass(frozen=True)
class _NamedShard:
    """A shard of which only the name is known, until rank 0 sends it through the process group."""

    name: str

    def blocks(self, first: int) -> Iterator[ShardBlock]:
        raise RuntimeError(f"{self.name}: read before rank 0 has sent it")

    def place(self, block: int, record: int) -> str:
        raise RuntimeError(f"{self.name}: located before rank 0 has sent it")


class StreamInput(NamedTuple):
    """The input of a streamed run; its shards are picklable, so that one rank looks for all.

    `sources` are described by `describe_sources`. `files` are some local files with their sizes.
    """

    shards: tuple[Shard, ...]
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
    reading = Reading((key,), max_bad=max_bad)
    try:
        sources = find_sources(inputs, reading)
    except UserError as error:
        raise UserError(*map(_with_training_flags, error.messages)) from None
    if any(source.name == "-" for source in sources):
        raise UserError("--streaming -: standard input cannot be read again by a resumed run: give files")
    part = max(_MIN_BYTES, sum(source.total_bytes or 0 for source in sources) // _ENOUGH_SHARDS)
    if len(sources) >= _ENOUGH_SHARDS:
        shards: list[Shard] = [_SourceShard.of(source, reading) for source in sources]
    else:
        shards = [shard for source in sources for shard in _cut(source, reading, part)]
    local = [source for source in sources if isinstance(source, FileSource)]
    some = local[:: -(-len(local) // _COMPARED_FILES) or 1]
    files = tuple((source.path, source.total_bytes) for source in some)
    return StreamInput(tuple(shards), describe_sources(sources), files)


def _with_training_flags(message: str) -> str:
    """Replace the flags of preprocess_data.py by those of training, where the size limit of a document is fixed."""
    message = re.sub(r": raise --max-document-megabytes, now (\d+)", r", \1 megabytes", message)
    return message.replace("--input", "--streaming").replace("--json-keys", "--streaming-key")


def _cut(source: Source, reading: Reading, part: int) -> Iterator[Shard]:
    if isinstance(source, JsonLinesFile):
        size = source.total_bytes
        for begin in range(0, size, part):
            yield _LinesShard(source.path, begin, min(begin + part, size), reading)
    elif isinstance(source, ParquetFile):
        for _, parts in groupby(source.row_groups(reading), key=attrgetter("number")):
            yield _RowGroupShard(tuple(parts), reading)
    elif isinstance(source, HubSource):
        count = source.count_shards()
        yield from (_SourceShard.of(HubShard(source, number, count), reading) for number in range(count))
    else:
        yield _SourceShard.of(source, reading)
