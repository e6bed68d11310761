"""Texts tokenised and packed while training reads them, without token files.

The input is cut into shards, and read by a fixed number of streams (--streaming-shards), however many ranks there are.
Sample n of the run comes from stream n % streams, and a stream belongs to data-parallel rank `stream % size`: as long
as the size divides the number of streams, every rank reads streams of its own, and a global batch holds the same
samples in any layout.

A stream by itself. In epoch e the shards are permuted by the stream (seed, e, SHARDS) of random numbers, and stream v
reads those at places v, v + streams, ... of that order, one after the other. It reads blocks of documents until it has
a window of them (--streaming-shuffle-buffer), which ends with the epoch at the latest; permutes it, window w by the
stream (seed, w, WINDOWS + v); joins the tokens of all documents, each with its end-of-document token; and goes on with
the next window. A sample is seq_length + 1 of the joined tokens, the first of them the last of the sample before.

What is kept for a resumed run is where the window began in which the next sample begins, and how many tokens of it are
used: five numbers for each stream. A resumed run reads that window again, and no more. Records that were passed over
are kept beside that.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.batches import BatchShape
from megatron_ladder.data.reading.protocol import BadRecord
from megatron_ladder.data.samples import SampleRows, permutation
from megatron_ladder.data.skipped import SkippedRecords
from megatron_ladder.errors import UserError

SHARDS, WINDOWS = 2, 3
"""Purposes of random streams, beside those of samples.py; windows of stream v have WINDOWS + v."""
MOST_STREAMS = 64
"""What is chosen at most where nothing is said."""

Encode = Callable[[Sequence[str]], Iterable[Sequence[int] | NDArray[Any]]]
"""Texts -> their ids, without an end-of-document token."""


class Documents(NamedTuple):
    """What a block of a shard holds."""

    texts: list[str]
    bad: tuple[BadRecord, ...] = ()
    """Records that cannot be read."""


class Shard(Protocol):
    """A part of the input that is read in order."""

    @property
    def name(self) -> str:
        """What tells it from others, and from a changed one; not in which folder it is."""
        ...

    def blocks(self, first: int) -> Iterator[Documents]:
        """Its documents, some at a time; always the same ones.

        Args:
            first: blocks to leave out.
        """
        ...

    def place(self, block: int, record: int) -> str:
        """Where a record of a block is found, both counted from 0: `file:line` for a file of lines."""
        ...


class Position(NamedTuple):
    """How far a stream is."""

    epoch: int = 0
    shard: int = 0
    """Of its own in that epoch, in their order."""
    block: int = 0
    """Of that shard: with this one the window begins in which the next sample begins."""
    window: int = 0
    """Number of that window, from the beginning of the run."""
    used: int = 0
    """Tokens of the window that lie before the next sample."""


@dataclass(frozen=True)
class StreamPlan:
    """What decides the samples; the same in every layout."""

    shards: tuple[Shard, ...]
    streams: int
    seq_length: int
    seed: int
    window_documents: int
    """Of one stream, at least; a window ends with a block."""
    eod_id: int
    sources: tuple[dict[str, Any], ...] = ()
    """What the input holds, as stream_contents.py tells it."""
    most_bad: int = 0
    """Records that may be passed over because they cannot be read."""

    def describe(self) -> dict[str, Any]:
        """For a checkpoint: what a resumed run must have alike."""
        return self.cut() | {"sources": list(self.sources)}

    def cut(self) -> dict[str, Any]:
        """How the input is cut, which says what positions mean."""
        return {
            "streams": self.streams,
            "window_documents": self.window_documents,
            "eod_id": self.eod_id,
            "shards": len(self.shards),
            "shards_sha256": hashlib.sha256("\n".join(shard.name for shard in self.shards).encode()).hexdigest(),
        }


class _Window(NamedTuple):
    begins: Position
    """With nothing used."""
    tokens: NDArray[np.int32]


class TextStream:
    """One of the streams."""

    def __init__(
        self, plan: StreamPlan, number: int, encode: Encode, position: Position, skipped: SkippedRecords
    ) -> None:
        self._plan, self._number, self._encode, self._skipped = plan, number, encode, skipped
        self._next, self._used = position._replace(used=0), position.used
        self._windows: deque[_Window] = deque()
        self._blocks = self._blocks_from(position)

    @property
    def position(self) -> Position:
        """Of the next row."""
        begins = self._windows[0].begins if self._windows else self._next
        return begins._replace(used=self._used)

    def next_row(self) -> NDArray[np.int64]:
        """The next sample, [seq_length + 1].

        Raises:
            UserError: the input has no text, or cannot be read, or more of its records cannot than may be passed over.
        """
        length = self._plan.seq_length + 1
        while sum(len(window.tokens) for window in self._windows) - self._used < length:
            self._windows.append(self._read_window())
        row, filled, begin = np.empty(length, np.int64), 0, self._used
        for window in self._windows:
            piece = window.tokens[begin : begin + length - filled]
            row[filled : filled + len(piece)] = piece
            filled, begin = filled + len(piece), 0
        self._used += length - 1
        while self._used >= len(self._windows[0].tokens):
            self._used -= len(self._windows.popleft().tokens)
        return row

    def _read_window(self) -> _Window:
        """The next one that holds a token; others are passed over.

        Raises:
            UserError: every shard was read from beginning to end since the last token.
        """
        entered, without_token = self._next, set[int]()
        while True:
            begins = self._next
            tokens = self._tokens_of(self._read_texts(), begins.window)
            if len(tokens):
                return _Window(begins, tokens)
            read_whole = begins.epoch > entered.epoch or (entered.shard, entered.block) == (0, 0)
            if self._next.epoch > begins.epoch and read_whole:
                # One epoch says nothing of the input: in each the stream has other shards.
                without_token.update(self._own_shards(begins.epoch))
            if len(without_token) == len(self._plan.shards):
                raise UserError("--streaming: the input has no text")

    def _read_texts(self) -> list[str]:
        """Documents of the next window. Where the epoch had none left there are none, and the window has no number."""
        begins, texts = self._next, list[str]()
        for found, after in self._blocks:
            texts += found
            self._next = after._replace(window=begins.window + bool(texts))
            if len(texts) >= self._plan.window_documents or after.epoch > begins.epoch:
                break
        return texts

    def _tokens_of(self, texts: Sequence[str], window: int) -> NDArray[np.int32]:
        """The documents in the window's order, joined; nothing where none has a token."""
        order = permutation(len(texts), self._plan.seed, window, WINDOWS + self._number)
        documents = self._encode([texts[place] for place in order.tolist()]) if texts else []
        end = np.array([self._plan.eod_id], np.int32)
        pieces = [piece for ids in documents if len(ids) for piece in (np.asarray(ids, np.int32), end)]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def _own_shards(self, epoch: int) -> list[int]:
        order = permutation(len(self._plan.shards), self._plan.seed, epoch, SHARDS)
        return [int(place) for place in order[self._number :: self._plan.streams]]

    def _blocks_from(self, position: Position) -> Iterator[tuple[list[str], Position]]:
        """Documents from there on, each time with where those after them begin; none at the end of an epoch."""
        epoch, shard, block = position.epoch, position.shard, position.block
        while True:
            own = self._own_shards(epoch)
            for place in range(shard, len(own)):
                source = self._plan.shards[own[place]]
                for number, documents in enumerate(source.blocks(block), start=block):
                    if documents.bad:
                        self._skipped.take(own[place], number, documents.bad, source.place)
                    yield documents.texts, Position(epoch, place, number + 1)
                block = 0
            epoch, shard = epoch + 1, 0
            yield [], Position(epoch)


class StreamReader:
    """Reads the samples of one data-parallel rank, from its streams in turn."""

    def __init__(
        self,
        plan: StreamPlan,
        encode: Encode,
        shape: BatchShape,
        data_parallel_rank: int,
        consumed_samples: int,
        positions: Mapping[int, Position],
        vocab_size: int,
        skipped: SkippedRecords | None = None,
    ) -> None:
        """
        Args:
            consumed_samples: samples that all ranks together have read before.
            positions: of streams that were read before, this rank's at least; others are at their beginnings.
            skipped: records that were passed over before; none if not given.

        Raises:
            UserError: the data-parallel size does not divide the number of streams.
        """
        if plan.streams % shape.data_parallel_size:
            raise UserError(
                f"--streaming-shards {plan.streams}: so many streams cannot be dealt to {shape.data_parallel_size} "
                "data-parallel ranks: start with a data-parallel size that divides them"
            )
        own = range(data_parallel_rank, plan.streams, shape.data_parallel_size)
        self._skipped = skipped or SkippedRecords(plan.most_bad)
        self._streams = {
            number: TextStream(plan, number, encode, positions.get(number, Position()), self._skipped)
            for number in own
        }
        self._plan, self._shape, self._rank = plan, shape, data_parallel_rank
        self._vocab_size = vocab_size
        self._next = consumed_samples

    def read(self) -> SampleRows:
        """The next rows [n, s + 1]."""
        numbers = np.arange(self._next, self._next + self._shape.global_batch_size)
        own = numbers[numbers % self._shape.data_parallel_size == self._rank]
        rows = np.stack([self._streams[number].next_row() for number in (own % self._plan.streams).tolist()])
        self._next += self._shape.global_batch_size
        if int(rows.max()) >= self._vocab_size:
            raise UserError(
                f"--tokenizer-model: gives token id {rows.max()}, the model has ids 0 to {self._vocab_size - 1}: leave "
                "--vocab-size out"
            )
        return SampleRows(rows, None)

    def state(self) -> dict[str, Any]:
        """Positions of this rank's streams by their numbers, and records that were passed over."""
        positions = {str(number): list(stream.position) for number, stream in self._streams.items()}
        return {"positions": positions, "skipped": self._skipped.state()}


def positions_of(states: Sequence[Mapping[str, Any]]) -> dict[int, Position]:
    """Of the states that all ranks had, whatever their number: where each stream was."""
    return {int(number): Position(*place) for state in states for number, place in state["positions"].items()}


def skipped_of(states: Sequence[Mapping[str, Any]]) -> list[Sequence[int]]:
    """Of the states that all ranks had: records that were passed over. Early states do not tell, and had none."""
    return [found for state in states for found in state.get("skipped", ())]


def choose_streams(asked: int | None, shards: int, data_parallel_size: int) -> int:
    """How many streams there are: as asked, or the most that the shards and the ranks allow, up to MOST_STREAMS.

    Raises:
        UserError: there are fewer shards than streams, or the ranks cannot share the streams evenly.
    """
    streams = asked
    if streams is None:
        streams = max(min(shards, MOST_STREAMS) // data_parallel_size, 1) * data_parallel_size
        powers = [power for power in (64, 32, 16, 8, 4, 2, 1) if power <= shards and power % data_parallel_size == 0]
        # A power of two can be dealt to other numbers of ranks later.
        streams = powers[0] if powers else streams
    if streams % data_parallel_size:
        raise UserError(
            f"--streaming-shards {streams} is not a multiple of the data-parallel size {data_parallel_size}"
        )
    if streams > shards:
        raise UserError(
            f"--streaming-shards {streams}: the input can be cut into {shards} shards only: give more files, or start "
            "with fewer data-parallel processes" + ("" if asked is None else ", or ask for fewer streams")
        )
    return streams
