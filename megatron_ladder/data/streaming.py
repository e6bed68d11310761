"""Tokenises and packs texts while training reads them, without token files.

The input is divided into shards that can be read concurrently: an uncompressed file of JSON lines into ranges of whole
lines, a Parquet file into row groups, a data set of the `datasets` library into its own shards; any other file is one
shard, and so is each of many files. The division depends only on the input. A fixed number of streams
(--streaming-shards) read them, which does not depend on the number of ranks. Sample n of the run comes from stream
n % streams, and a stream belongs to data-parallel rank `stream % size`. If the size divides the number of streams,
every rank reads its own streams, and a global batch contains the same samples in any layout.

In epoch e the shards are permuted by the random stream (seed, e, _SHARDS), and stream v reads the shards at positions
v, v + streams, ... of that order. It reads blocks of documents until it has a window (--streaming-shuffle-buffer),
which ends with the epoch at the latest. It permutes window w by the random stream (seed, w, _WINDOWS + v), and
concatenates the tokens of all documents, each followed by the end-of-document token. A sample is seq_length + 1 of
these tokens; its first token is the last one of the previous sample.

The state for a resumed run is the beginning of the window in which the next sample begins, and the number of used
tokens of that window: five numbers per stream. A resumed run reads only that window again. The state also contains the
skipped records.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.batches import BatchShape
from megatron_ladder.data.encoding import join_documents
from megatron_ladder.data.identity import describe_sources
from megatron_ladder.data.reading.find import find_sources
from megatron_ladder.data.reading.protocol import BadRecord, Reading, Shard
from megatron_ladder.data.samples import SampleRows, permutation
from megatron_ladder.errors import Problem, UserError, flag_name

_SHARDS, _WINDOWS = 2, 3
"""Purposes of random streams, in addition to those of samples.py; windows of stream v have _WINDOWS + v."""
_MAX_STREAMS = 64
"""Largest number of streams that is chosen automatically."""
_ENOUGH_SHARDS = 256
"""Files are divided if there are fewer files than this."""
_MIN_BYTES = 1 << 12
"""Approximate minimum size of a part of a file of lines."""
Encode = Callable[[Sequence[str], bool], Sequence[list[int]]]
"""Texts, and whether the spelling of a special token becomes that token -> ids without an end-of-document token."""


class StreamPosition(NamedTuple):
    """The position of a stream: the beginning of the window in which the next sample begins, and its used tokens.

    `shard` is an index among the stream's shards of the epoch; `window` counts from the beginning of the run.
    """

    epoch: int = 0
    shard: int = 0
    block: int = 0
    window: int = 0
    used: int = 0


@dataclass(frozen=True)
class StreamPlan:
    """Everything that determines the samples; the same in every layout."""

    shards: tuple[str, ...]
    """Their labels, which all ranks know; rank 0 alone has looked for the shards."""
    streams: int
    seq_length: int
    seed: int
    window_documents: int
    """Minimum number of documents in a window of one stream; a window ends with a block."""
    eod_id: int
    sources: tuple[dict[str, Any], ...] = ()
    """Descriptions of the input, see `identity.describe_sources`."""
    max_bad: int = 0
    parse_special_tokens: bool = True
    """Whether the spelling of a special token becomes that token; the same for a tokenizer that finds none."""

    def describe(self) -> dict[str, Any]:
        """Return everything that must be equal in a resumed run, for a checkpoint."""
        return self.cut() | {"sources": list(self.sources)}

    def cut(self) -> dict[str, Any]:
        """Return how the input is divided, which defines the meaning of positions."""
        return {
            "streams": self.streams,
            "window_documents": self.window_documents,
            "eod_id": self.eod_id,
            "shards": len(self.shards),
            "shards_sha256": hashlib.sha256("\n".join(self.shards).encode()).hexdigest(),
            # Checkpoints of earlier versions have no entry, and parsed them.
            **({} if self.parse_special_tokens else {flag_name("streaming_parse_special_tokens"): False}),
        }


@dataclass(eq=False)
class _ShardStream:
    plan: StreamPlan
    shards: Sequence[Shard]
    number: int
    encode: Encode
    skip: Callable[[int, int, Sequence[BadRecord]], None]
    start: InitVar[StreamPosition]

    def __post_init__(self, start: StreamPosition) -> None:
        self._next = start._replace(used=0)
        self._used = start.used
        # Each window begins at a position with 0 used tokens.
        self._windows = deque[tuple[StreamPosition, NDArray[np.int32]]]()
        self._blocks = self._blocks_from(start)

    @property
    def position(self) -> StreamPosition:
        """Position of the next row."""
        begins = self._windows[0][0] if self._windows else self._next
        return begins._replace(used=self._used)

    def next_row(self) -> NDArray[np.int64]:
        """Return the next sample [seq_length + 1]."""
        length = self.plan.seq_length + 1
        while sum(len(tokens) for _, tokens in self._windows) - self._used < length:
            self._windows.append(self._read_window())
        row = np.empty(length, np.int64)
        filled = 0
        begin = self._used
        for _, tokens in self._windows:
            piece = tokens[begin : begin + length - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
            begin = 0
        self._used += length - 1
        while self._used >= len(self._windows[0][1]):
            self._used -= len(self._windows.popleft()[1])
        return row

    def _read_window(self) -> tuple[StreamPosition, NDArray[np.int32]]:
        """Return the next window that contains a token; windows without documents are not counted."""
        plan = self.plan
        entered = self._next
        without_token = set[int]()
        while True:
            begins = self._next
            texts = list[str]()
            for block_texts, after in self._blocks:
                texts += block_texts
                self._next = after._replace(window=begins.window + 1 if texts else begins.window)
                if len(texts) >= plan.window_documents or after.epoch > begins.epoch:
                    break
            order = permutation(len(texts), plan.seed, begins.window, _WINDOWS + self.number).tolist()
            shuffled = [texts[index] for index in order]
            documents = self.encode(shuffled, plan.parse_special_tokens) if texts else []
            tokens, _ = join_documents(documents, plan.eod_id)
            if len(tokens):
                return begins, tokens
            read_whole = begins.epoch > entered.epoch or (entered.shard, entered.block) == (0, 0)
            if self._next.epoch > begins.epoch and read_whole:
                # One epoch is not the whole input: the stream has other shards in each epoch.
                without_token.update(self._shards_of(begins.epoch))
            if len(without_token) == len(plan.shards):
                raise UserError(Problem({"streaming": None}, "{}: the input has no text"))

    def _shards_of(self, epoch: int) -> list[int]:
        order: list[int] = permutation(len(self.plan.shards), self.plan.seed, epoch, _SHARDS).tolist()
        return order[self.number :: self.plan.streams]

    def _blocks_from(self, position: StreamPosition) -> Iterator[tuple[list[str], StreamPosition]]:
        """Yield documents from a position on, each time with the position after them; none at the end of an epoch."""
        epoch = position.epoch
        shard = position.shard
        first = position.block
        while True:
            stream_shards = self._shards_of(epoch)
            for index in range(shard, len(stream_shards)):
                for number, block in enumerate(self.shards[stream_shards[index]].blocks(first), start=first):
                    records, bad = block.read()
                    self.skip(stream_shards[index], number, bad)
                    yield [text for (text,) in records], StreamPosition(epoch, index, number + 1)
                first = 0
            epoch += 1
            shard = 0
            yield [], StreamPosition(epoch)


@dataclass(eq=False)
class StreamReader:
    """Reads the samples of one data-parallel rank from its streams alternately. Every rank has as many streams.

    Each unreadable record counts once, and a checkpoint lists those of all ranks. So any number of ranks can read an
    input with at most `max_bad` of them any number of times.
    """

    plan: StreamPlan
    shards: InitVar[Sequence[Shard]]
    encode: InitVar[Encode]
    shape: BatchShape
    data_parallel_rank: int
    consumed_samples: InitVar[int]
    """Samples that all ranks together have read."""
    states: InitVar[Sequence[Mapping[str, Any]]]
    """Those of all ranks at that time; other streams are new."""
    vocab_size: int
    report: Callable[[str], None] = print
    """Receives a line about each record that is skipped for the first time."""

    def __post_init__(
        self, shards: Sequence[Shard], encode: Encode, consumed_samples: int, states: Sequence[Mapping[str, Any]]
    ) -> None:
        positions: dict[int, StreamPosition] = {}
        self._skipped = set[tuple[int, int, int]]()
        for state in states:
            for number, position in state["positions"].items():
                positions[int(number)] = StreamPosition(*map(int, position))
            self._skipped.update((shard, block, record) for shard, block, record in state["skipped"])
        self._streams = {
            number: _ShardStream(self.plan, shards, number, encode, self._skip, positions.get(number, StreamPosition()))
            for number in range(self.data_parallel_rank, self.plan.streams, self.shape.data_parallel_size)
        }
        self._next = consumed_samples

    def _skip(self, shard: int, block: int, bad: Sequence[BadRecord]) -> None:
        """Count the bad records of a block; raises UserError for too many."""
        limit = self.plan.max_bad
        for record in bad:
            record_id = (shard, block, record.number)
            # A block with too many bad records was not read to its end.
            if record_id in self._skipped and len(bad) <= limit:
                continue
            if len(self._skipped) >= limit:
                already = f" ({len(self._skipped)} before it were skipped: {{streaming_skip_bad_lines}} {limit})"
                raise UserError(Problem({"streaming": record.reason}, "{}" + already * (limit > 0)))
            self._skipped.add(record_id)
            self.report(f"skipped: {Problem({'streaming': record.reason}, '{}')}")

    def read(self) -> SampleRows:
        """Return the next rows [n, s + 1]; raises UserError for an input without text or with too many bad records."""
        numbers = np.arange(self._next, self._next + self.shape.global_batch_size)
        rank_samples = numbers[numbers % self.shape.data_parallel_size == self.data_parallel_rank]
        rows = np.stack([self._streams[number].next_row() for number in (rank_samples % self.plan.streams).tolist()])
        self._next += self.shape.global_batch_size
        if int(rows.max()) >= self.vocab_size:
            reason = f"{{}}: gives token id {rows.max()}, the model has ids 0 to {self.vocab_size - 1}"
            raise UserError(Problem({"tokenizer_model": None}, reason, "leave {vocab_size} out"))
        return SampleRows(rows, None)

    def state(self) -> dict[str, Any]:
        """Return the positions of this rank's streams by their numbers, and the skipped records; JSON-able."""
        positions = {str(number): list(stream.position) for number, stream in self._streams.items()}
        return {"positions": positions, "skipped": [list(record_id) for record_id in sorted(self._skipped)]}


def choose_streams(requested: int | None, shards: int, data_parallel_size: int) -> int:
    """Return the number of streams: as requested, or the most that shards and ranks allow, up to _MAX_STREAMS.

    Raises UserError if there are fewer shards than streams, or the ranks do not divide the streams evenly.
    """
    streams = requested
    if streams is None:
        # A power of two can be divided among other numbers of ranks later.
        powers = (power for power in (64, 32, 16, 8, 4, 2, 1) if power <= shards and power % data_parallel_size == 0)
        streams = next(powers, max(min(shards, _MAX_STREAMS) // data_parallel_size, 1) * data_parallel_size)
    if streams % data_parallel_size:
        reason = f"{{}} is not a multiple of the data-parallel size {data_parallel_size}"
        raise UserError(Problem({"streaming_shards": streams}, reason))
    if streams > shards:
        fix = "give more files, or start with fewer data-parallel processes"
        if requested is not None:
            fix += ", or request fewer streams"
        raise UserError(Problem({"streaming_shards": streams}, f"{{}}: the input has only {shards} shards", fix))
    return streams


class StreamInput(NamedTuple):
    """What every rank knows of the input of a streamed run; JSON-able."""

    shards: tuple[str, ...]
    """Their labels."""
    sources: tuple[dict[str, Any], ...]
    """See `describe_sources`."""


def find_input(inputs: Sequence[str], key: str, max_bad: int = 0) -> tuple[tuple[Shard, ...], StreamInput]:
    """Return the shards of arguments such as those of preprocess_data.py's --input, and what describes them.

    The shards are picklable, so that one rank looks for all. Up to `max_bad` unreadable records are skipped. Raises
    UserError for an argument that cannot be read repeatedly.
    """
    if "-" in inputs:
        reason = "{}: standard input cannot be read again by a resumed run"
        raise UserError(Problem({"streaming": "-"}, reason, "give files"))
    reading = Reading(
        (key,), True, max_bad=max_bad, input_field="streaming", keys_field="streaming_key", size_field=None
    )
    sources = find_sources(inputs, reading)
    part = None
    if len(sources) < _ENOUGH_SHARDS:
        part = max(_MIN_BYTES, sum(source.total_bytes or 0 for source in sources) // _ENOUGH_SHARDS)
    shards = tuple(shard for source in sources for shard in source.shards(part))
    return shards, StreamInput(tuple(shard.label for shard in shards), describe_sources(sources))
