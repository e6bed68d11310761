"""The input of a streamed run, cut into shards that can be read side by side.

How it is cut depends on the input alone, never on the number of streams or ranks: an uncompressed file of JSON lines
into runs of whole lines, a Parquet file into row groups, a data set of the `datasets` library into its own shards; any
other file is one shard. Where there are many files anyway, each is one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ladder.data.reading.files import HugeLine, JsonLinesFile, LineSpan, end_of_line
from megatron_ladder.data.reading.find import find_sources
from megatron_ladder.data.reading.hub import HubShard, HubSource
from megatron_ladder.data.reading.parquet import ParquetFile, RowGroup
from megatron_ladder.data.reading.protocol import SPAN_BYTES, Block, Parsed, Reading, Source
from megatron_ladder.data.stream_contents import describe_sources
from megatron_ladder.data.streaming import Shard
from megatron_ladder.errors import UserError

ENOUGH_SHARDS = 256
"""Files are cut as long as there are fewer."""
LEAST_BYTES = 1 << 12
"""Of a part of a file of lines, about."""


@dataclass(frozen=True)
class SourceShard:
    """A whole source."""

    source: Source
    reading: Reading

    @property
    def name(self) -> str:
        """The source, without the folder, and its size."""
        return f"{Path(self.source.name).name} {self.source.total_bytes}"

    def blocks(self, first: int) -> Iterator[list[str]]:
        """See Shard."""
        if isinstance(self.source, HubShard):
            blocks = self.source.blocks_from(first, self.reading)
        else:
            blocks = islice(self.source.blocks(self.reading), first, None)
        return _texts(self.source.name, blocks, first, self.reading)


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

    def blocks(self, first: int) -> Iterator[list[str]]:
        """See Shard."""
        return _texts(f"{self.path} from byte {self.begin}", islice(self._spans(), first, None), first, self.reading)

    def _spans(self) -> Iterator[Block]:
        with open(self.path, "rb") as file:
            # The line before may be larger than the shard.
            begin = end_of_line(file, self.begin - 1, self.end) if self.begin else 0
            end = end_of_line(file, self.end - 1) if begin < self.end else begin
            while begin < end:
                following = min(end_of_line(file, begin + SPAN_BYTES - 1), end)
                if following - begin <= SPAN_BYTES + self.reading.most_bytes:
                    yield LineSpan(self.path, begin, following)
                else:
                    file.seek(begin)
                    last = begin + file.read(SPAN_BYTES).rfind(b"\n") + 1
                    if last > begin:
                        yield LineSpan(self.path, begin, last)
                    yield HugeLine(following - last, following - last)
                begin = following


@dataclass(frozen=True)
class RowGroupShard:
    """A row group of a Parquet file, which is one block."""

    group: RowGroup
    reading: Reading

    @property
    def name(self) -> str:
        """The file, without the folder, the group and its size."""
        return f"{self.group.path.name} {self.group.number} {self.group.file_bytes}"

    def blocks(self, first: int) -> Iterator[list[str]]:
        """See Shard."""
        place = f"{self.group.path} row group {self.group.number}"
        return _texts(place, islice([self.group], first, None), first, self.reading)


def _texts(place: str, blocks: Iterator[Block], first: int, reading: Reading) -> Iterator[list[str]]:
    for number, block in enumerate(blocks, start=first):
        parsed: Parsed = block.read(reading)
        if parsed.bad:
            bad = parsed.bad[0]
            raise UserError(f"--streaming {place}: record {bad.number} of its block {number}: {bad.reason}")
        yield parsed.columns[0]


class StreamInput(NamedTuple):
    """What is streamed."""

    shards: tuple[Shard, ...]
    sources: tuple[dict[str, Any], ...]
    """What each source holds, as stream_contents.py tells it."""


def find_input(inputs: Sequence[str], key: str) -> StreamInput:
    """The input behind words as those of preprocess_data.py's --input.

    Raises:
        UserError: there is nothing that can be read behind a word, or it can be read only once.
    """
    # Plain text has no keys.
    reading = Reading((key,))
    try:
        sources = find_sources(inputs, reading)
    except UserError as error:
        words = ("--input", "--json-keys"), ("--streaming", "--streaming-key")
        raise UserError(*(_renamed(mistake, *words) for mistake in error.mistakes)) from None
    if any(source.name == "-" for source in sources):
        raise UserError("--streaming -: standard input cannot be read again by a resumed run: give files")
    if len(sources) >= ENOUGH_SHARDS:
        shards: tuple[Shard, ...] = tuple(SourceShard(source, reading) for source in sources)
    else:
        total = sum(source.total_bytes or 0 for source in sources)
        part = max(LEAST_BYTES, total // ENOUGH_SHARDS)
        shards = tuple(shard for source in sources for shard in _cut(source, reading, part))
    return StreamInput(shards, describe_sources(sources))


def _renamed(mistake: str, before: Sequence[str], after: Sequence[str]) -> str:
    for old, new in zip(before, after, strict=True):
        mistake = mistake.replace(old, new)
    return mistake


def _cut(source: Source, reading: Reading, part: int) -> Iterator[Shard]:
    if isinstance(source, JsonLinesFile):
        size = source.total_bytes
        for begin in range(0, size, part):
            yield LinesShard(source.path, begin, min(begin + part, size), reading)
    elif isinstance(source, ParquetFile):
        for block in source.blocks(reading):
            assert isinstance(block, RowGroup)
            yield RowGroupShard(block, reading)
    elif isinstance(source, HubSource):
        count = source.count_shards()
        yield from (SourceShard(HubShard(source, number, count), reading) for number in range(count))
    else:
        yield SourceShard(source, reading)
