"""The input of a streamed run, cut into shards that can be read side by side.

How it is cut depends on the input alone, never on the number of streams or ranks: an uncompressed file of JSON lines
into runs of whole lines, a Parquet file into row groups, a data set of the `datasets` library into its own shards; any
other file is one shard. Where there are many files anyway, each is one.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ladder.data.reading.files import HugeLine, JsonLinesFile, LineSpan, end_of_line
from megatron_ladder.data.reading.find import find_sources
from megatron_ladder.data.reading.hub import BATCH_ROWS, HubShard, HubSource
from megatron_ladder.data.reading.parquet import ParquetFile, RowGroup
from megatron_ladder.data.reading.protocol import SPAN_BYTES, BadRecord, Block, Reading, Source
from megatron_ladder.data.stream_contents import describe_sources
from megatron_ladder.data.streaming import Documents, Shard
from megatron_ladder.errors import UserError

ENOUGH_SHARDS = 256
"""Files are cut as long as there are fewer."""
LEAST_BYTES = 1 << 12
"""Of a part of a file of lines, about."""
LINES_COUNTED_BYTES = 1 << 30
"""Behind more of a file the number of a line is not counted, which takes a second or so."""


@dataclass(frozen=True)
class SourceShard:
    """A whole source."""

    source: Source
    reading: Reading

    @property
    def name(self) -> str:
        """The source, without the folder, and its size."""
        return f"{Path(self.source.name).name} {self.source.total_bytes}"

    def blocks(self, first: int) -> Iterator[Documents]:
        """See Shard."""
        if isinstance(self.source, HubShard):
            blocks = self.source.blocks_from(first, self.reading)
        else:
            blocks = islice(self.source.blocks(self.reading), first, None)
        return _documents(blocks, self.reading)

    def place(self, block: int, record: int) -> str:
        """See Shard; reads the blocks before once more, except of a data set of the library."""
        if isinstance(self.source, HubShard):
            return self.source.place(block * BATCH_ROWS + record)
        before = islice(self.source.blocks(self.reading), block)
        return self.source.place(sum(earlier.read(self.reading).records for earlier in before) + record)


@dataclass(frozen=True)
class LinesShard:
    """The lines of a file that begin in bytes begin .. end - 1."""

    path: Path
    begin: int
    end: int
    reading: Reading

    @property
    def name(self) -> str:
        """The file, without the folder, and the bytes."""
        return f"{self.path.name} {self.begin}-{self.end}"

    def blocks(self, first: int) -> Iterator[Documents]:
        """See Shard."""
        return _documents((span for _, span in islice(self._spans(), first, None)), self.reading)

    def place(self, block: int, record: int) -> str:
        """See Shard; a line far from the beginning of its file is told by the byte near it."""
        begin, _ = next(islice(self._spans(), block, None))
        if begin > LINES_COUNTED_BYTES:
            return f"{self.path}: line {record + 1} from byte {begin} on"
        with open(self.path, "rb") as file:
            pieces = (file.read(min(SPAN_BYTES, begin - start)) for start in range(0, begin, SPAN_BYTES))
            lines = sum(piece.count(b"\n") for piece in pieces)
        return f"{self.path}:{lines + record + 1}"

    def _spans(self) -> Iterator[tuple[int, Block]]:
        """Each with the byte at which it begins."""
        with open(self.path, "rb") as file:
            # The line before may be larger than the shard.
            begin = end_of_line(file, self.begin - 1, self.end) if self.begin else 0
            end = end_of_line(file, self.end - 1) if begin < self.end else begin
            while begin < end:
                following = min(end_of_line(file, begin + SPAN_BYTES - 1), end)
                if following - begin <= SPAN_BYTES + self.reading.most_bytes:
                    yield begin, LineSpan(self.path, begin, following)
                else:
                    file.seek(begin)
                    last = begin + file.read(SPAN_BYTES).rfind(b"\n") + 1
                    if last > begin:
                        yield begin, LineSpan(self.path, begin, last)
                    yield last, HugeLine(following - last, following - last)
                begin = following


@dataclass(frozen=True)
class RowGroupShard:
    """A row group of a Parquet file."""

    parts: tuple[RowGroup, ...]
    """Of its rows, in order: the blocks."""
    reading: Reading

    @property
    def name(self) -> str:
        """The file, without the folder, the group and its size; how it is cut, if it is."""
        path, number = self.parts[0].path, self.parts[0].number
        size = sum(part.file_bytes for part in self.parts)
        return f"{path.name} {number} {size}" + (f" {len(self.parts)}" if len(self.parts) > 1 else "")

    def blocks(self, first: int) -> Iterator[Documents]:
        """See Shard."""
        return _documents(iter(self.parts[first:]), self.reading)

    def place(self, block: int, record: int) -> str:
        """See Shard: the row of the file, counted from 0."""
        import pyarrow.parquet

        part = self.parts[block]
        metadata = pyarrow.parquet.read_metadata(part.path)
        before = sum(metadata.row_group(number).num_rows for number in range(part.number))
        return ParquetFile(part.path).place(before + part.rows.start + record)


def _documents(blocks: Iterator[Block], reading: Reading) -> Iterator[Documents]:
    for block in blocks:
        parsed = block.read(reading)
        bad = tuple(BadRecord(record.number, _in_our_words(record.reason)) for record in parsed.bad)
        yield Documents(parsed.columns[0], bad)


class StreamInput(NamedTuple):
    """What is streamed."""

    shards: tuple[Shard, ...]
    sources: tuple[dict[str, Any], ...]
    """What each source holds, as stream_contents.py tells it."""


def find_input(inputs: Sequence[str], key: str, most_bad: int = 0) -> StreamInput:
    """The input behind words as those of preprocess_data.py's --input.

    Args:
        most_bad: records that may be passed over because they cannot be read.

    Raises:
        UserError: there is nothing that can be read behind a word, or it can be read only once.
    """
    # Plain text has no keys.
    reading = Reading((key,), most_bad=most_bad)
    try:
        sources = find_sources(inputs, reading)
    except UserError as error:
        raise UserError(*map(_in_our_words, error.mistakes)) from None
    if any(source.name == "-" for source in sources):
        raise UserError("--streaming -: standard input cannot be read again by a resumed run: give files")
    if len(sources) >= ENOUGH_SHARDS:
        shards: tuple[Shard, ...] = tuple(SourceShard(source, reading) for source in sources)
    else:
        total = sum(source.total_bytes or 0 for source in sources)
        part = max(LEAST_BYTES, total // ENOUGH_SHARDS)
        shards = tuple(shard for source in sources for shard in _cut(source, reading, part))
    return StreamInput(shards, describe_sources(sources))


def _in_our_words(mistake: str) -> str:
    """With the flags of training instead of those of preprocess_data.py, whose limit of a document is a fixed one."""
    mistake = re.sub(r": allow them by --max-document-megabytes, now (\d+)", r", \1 megabytes", mistake)
    return mistake.replace("--input", "--streaming").replace("--json-keys", "--streaming-key")


def _cut(source: Source, reading: Reading, part: int) -> Iterator[Shard]:
    if isinstance(source, JsonLinesFile):
        size = source.total_bytes
        for begin in range(0, size, part):
            yield LinesShard(source.path, begin, min(begin + part, size), reading)
    elif isinstance(source, ParquetFile):
        for _, parts in groupby(source.row_groups(reading), key=attrgetter("number")):
            yield RowGroupShard(tuple(parts), reading)
    elif isinstance(source, HubSource):
        count = source.count_shards()
        yield from (SourceShard(HubShard(source, number, count), reading) for number in range(count))
    else:
        yield SourceShard(source, reading)
