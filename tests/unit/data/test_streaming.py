import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ladder.data.batches import BatchShape
from megatron_ladder.data.reading.protocol import BadRecord, Parsed
from megatron_ladder.data.streaming import StreamPlan, StreamReader
from megatron_ladder.errors import UserError

EOD, SEQ_LENGTH, STREAMS = 0, 7, 4


class Shard:
    """A shard of blocks of texts, of which None is an unreadable record; counts the blocks that were read."""

    def __init__(self, name: str, blocks: Sequence[Sequence[str | None]]) -> None:
        self.label, self._blocks, self.read = name, blocks, 0

    def blocks(self, first: int) -> Iterator[Any]:
        for number, block in enumerate(self._blocks[first:], first + 1):
            self.read += 1
            bad = [BadRecord(0, f"{self.label}:{number}: not JSON") for text in block if text is None]
            parsed = Parsed([[text] for text in block if text is not None], bad)
            yield SimpleNamespace(read=partial(tuple, parsed))


def numbers(first: int, blocks: Sequence[int]) -> Shard:
    """Return a shard of texts that are numbers."""
    ends = itertools.accumulate(blocks, initial=first)
    return Shard(f"shard {first}", [list(map(str, range(*ends))) for ends in itertools.pairwise(ends)])


def encode(texts: Sequence[str], parse_special_tokens: bool = True) -> list[list[int]]:
    """Document n repeats n + 1 one to three times; every 31st has no token."""
    return [[int(text) + 1] * (0 if int(text) % 31 == 30 else 1 + int(text) % 3) for text in texts]


def shards_of_numbers() -> list[Shard]:
    """Return 11 shards of 31 documents each, number 5 without any."""
    return [numbers(100 * place, [] if place == 5 else [10, 1, 20]) for place in range(11)]


def plan_of(window: int = 12, streams: int = STREAMS, seed: int = 1) -> StreamPlan:
    labels = tuple(shard.label for shard in shards_of_numbers())
    return StreamPlan(labels, streams, SEQ_LENGTH, seed, window, EOD)


def reader_of(
    plan: StreamPlan,
    rank: int = 0,
    size: int = 1,
    batch: int = 8,
    consumed: int = 0,
    states: Sequence[Any] = (),
    shards: Sequence[Shard] | None = None,
    **more: Any,
) -> StreamReader:
    states, shape = json.loads(json.dumps(states)), BatchShape(batch, 1, size)
    return StreamReader(plan, shards or shards_of_numbers(), encode, shape, rank, consumed, states, 2000, **more)


def rows_of(readers: Sequence[StreamReader], steps: int) -> list[list[list[int]]]:
    """Return the sorted samples of all ranks for each step."""
    return [sorted(row for reader in readers for row in reader.read().tokens.tolist()) for _ in range(steps)]


def documents_of(tokens: Sequence[int]) -> list[int]:
    """Return the numbers of the documents that end in these tokens, after checking that each is complete."""
    found, current = [], list[int]()
    for token in tokens:
        if token == EOD:
            if current:
                number = current[0] - 1
                assert current == encode([str(number)])[0]
                found.append(number)
            current = []
        else:
            current.append(token)
    return found


def stream_tokens(plan: StreamPlan, stream: int, rows: int) -> list[int]:
    """Return the concatenated tokens of one stream."""
    reader = reader_of(plan, stream, STREAMS, batch=STREAMS)
    read = [reader.read().tokens[0].tolist() for _ in range(rows)]
    for before, after in itertools.pairwise(read):
        assert before[-1] == after[0]
    return [read[0][0], *(token for row in read for token in row[1:])]


def test_every_document_occurs_once_per_epoch() -> None:
    texts = [str(100 * place + number) for place in range(11) if place != 5 for number in range(31)]
    expected = {int(text) for text in texts if encode([text])[0]}
    per_stream = [documents_of(stream_tokens(plan_of(), stream, 150)) for stream in range(STREAMS)]
    seen = Counter[int]()
    for documents in per_stream:
        assert documents != sorted(documents)
        # The first epoch of this stream ends when a document repeats.
        first = next(place for place in range(len(documents)) if documents[place] in documents[:place])
        seen.update(documents[:first])
    assert set(seen) <= expected
    # In its second epoch a stream may read documents that another stream had in the first.
    assert expected <= set().union(*per_stream)


@pytest.mark.parametrize("window", [1, 12, 1000])
@pytest.mark.parametrize("stop", [0, 5, 23])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1)])
def test_a_resumed_run_equals_an_uninterrupted_one(window: int, stop: int, before: int, after: int) -> None:
    """Also with another number of ranks; the states are equal too, because the run may be stopped again."""
    plan = plan_of(window)
    whole = reader_of(plan)
    expected = [(rows_of([whole], 1), whole.state()["positions"]) for _ in range(40)]
    first = [reader_of(plan, rank, before) for rank in range(before)]
    assert [rows_of(first, 1) for _ in range(stop)] == [rows for rows, _ in expected[:stop]]
    states = [reader.state() for reader in first]
    second = [reader_of(plan_of(window), rank, after, consumed=8 * stop, states=states) for rank in range(after)]
    for rows, positions in expected[stop:]:
        assert rows_of(second, 1) == rows
        assert {number: at for one in second for number, at in one.state()["positions"].items()} == positions


def test_resuming_rereads_only_one_window() -> None:
    plan = plan_of(window=12)
    begun = reader_of(plan)
    rows_of([begun], 60)
    fresh = shards_of_numbers()
    reader_of(plan, consumed=480, states=[begun.state()], shards=fresh).read()
    # A window is two or three blocks, and two rows of a stream are in at most two windows.
    assert sum(shard.read for shard in fresh) <= 2 * 3 * STREAMS


def spoiled_reader(max_bad: int, reported: list[str], states: Sequence[Any] = (), consumed: int = 0) -> StreamReader:
    """Return a reader of three shards; the second and third have three bad records together."""
    texts: list[list[str | None]] = [["1", "2"], ["3", None, "4"], [None, "5", None, "6"]]
    shards = [Shard(f"{name}.jsonl", [[text] for text in own]) for name, own in zip("abc", texts, strict=True)]
    plan = StreamPlan(tuple(shard.label for shard in shards), 2, SEQ_LENGTH, 1, 2, EOD, max_bad=max_bad)
    return reader_of(plan, batch=2, consumed=consumed, states=states, shards=shards, report=reported.append)


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4])
def test_a_resumed_run_continues_counting_bad_records(stop: int) -> None:
    """Known records are not reported or counted again; the third record exceeds the limit before and after a stop."""
    whole, reported = spoiled_reader(3, []), list[str]()
    expected = [whole.read().tokens.tolist() for _ in range(30)]
    begun = spoiled_reader(3, reported)
    assert [begun.read().tokens.tolist() for _ in range(stop)] == expected[:stop]
    resumed = spoiled_reader(3, reported, states=[begun.state()], consumed=2 * stop)
    assert [resumed.read().tokens.tolist() for _ in range(stop, 30)] == expected[stop:]
    assert len(reported) == len(set(reported)) == 3

    fewer = spoiled_reader(2, [], states=[begun.state()], consumed=2 * stop)
    if len(begun.state()["skipped"]) < 3:
        with pytest.raises(UserError, match=r"jsonl:\d: not JSON \(2 before it were skipped: --streaming-skip-bad-lin"):
            for _ in range(30):
                fewer.read()


def test_ids_outside_of_the_vocabulary() -> None:
    reader = StreamReader(plan_of(), shards_of_numbers(), encode, BatchShape(8, 1), 0, 0, [], 10)
    with pytest.raises(UserError, match="--tokenizer-model: gives token id .*, the model has ids 0 to 9"):
        reader.read()
