"""From data sets to the micro-batches of a rank."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ladder.config.data import DataConfig
from megatron_ladder.data.batches import (
    BatchShape,
    DocumentRules,
    GlobalBatchLoader,
    SampleReader,
    UnreadBatches,
    make_micro_batches,
)
from megatron_ladder.data.indexed import Sidecar, read_sidecar, sidecar_path, write_sidecar
from megatron_ladder.data.loader import OrderOptions, check_tokenizer, open_sources
from megatron_ladder.data.samples import SampleRows, SampleSource
from megatron_ladder.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from megatron_ladder.errors import UserError
from tests.helpers.patience import patient
from tests.helpers.runs import errors_of
from tests.helpers.tokens import MakeDataset
from tests.reference.documents import begins_after, loss_mask_of, sight_of

EOD = 7


def rows_with_ends(seed: int, count: int = 6, length: int = 15) -> SampleRows:
    """Return rows with document ends at the first, the last, neighbouring and other positions."""
    tokens = np.random.default_rng(seed).integers(0, 12, (count, length + 1)).astype(np.uint16)
    tokens[0, [0, 1, -1, -2]] = EOD
    tokens[1, tokens[1] == EOD] = 0
    return SampleRows(tokens, None)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_document_ends_match_megatron(positions: bool, attention: bool, loss: bool) -> None:
    rows = rows_with_ends(1)
    batches = make_micro_batches(rows, DocumentRules(EOD, positions, attention, loss), 2)
    assert len(batches) == 3
    for number, batch in enumerate(batches):
        both = torch.from_numpy(rows.tokens[2 * number : 2 * number + 2].astype(np.int64))
        assert torch.equal(batch.tokens, both[:, :-1]) and torch.equal(batch.labels, both[:, 1:])
        expected = sight_of(begins_after(batch.tokens, EOD), positions, attention)
        if positions:
            assert batch.positions is not None and torch.equal(batch.positions, expected.positions)
        else:
            assert batch.positions is None
        if attention:
            assert batch.document_bounds is not None and batch.document_bounds.dtype == torch.int32
            assert {0, 15, 30} <= set(batch.document_bounds.tolist())
            assert torch.equal(seen(batch.document_bounds, 2, 15), expected.visible)
        else:
            assert batch.document_bounds is None
        if loss:
            assert batch.loss_mask is not None and torch.equal(batch.loss_mask, loss_mask_of(batch.tokens, EOD))
        else:
            assert batch.loss_mask is None


def seen(bounds: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Return which tokens each token attends to [rows, length, length]."""
    number = torch.bucketize(torch.arange(rows * length), bounds, right=True).view(rows, length)
    earlier = torch.ones(length, length).tril().bool()
    return (number[:, :, None] == number[:, None, :]) & earlier


def test_masks_of_the_data_and_of_document_ends_are_combined() -> None:
    rows = rows_with_ends(2)._replace(loss_mask=np.tile(np.arange(16) % 2, (6, 1)).astype(np.uint8))
    (batch,) = make_micro_batches(rows, DocumentRules(EOD, eod_mask_loss=True), 6)
    # The label of place t is token t + 1.
    expected = ((torch.arange(15) + 1) % 2).float() * loss_mask_of(batch.tokens, EOD)
    assert batch.loss_mask is not None and torch.equal(batch.loss_mask, expected)


def test_given_document_begins_override_end_tokens() -> None:
    rows = rows_with_ends(3)
    begins = np.random.default_rng(3).random(rows.tokens.shape) < 0.3
    (batch,) = make_micro_batches(rows._replace(begins=begins), DocumentRules(EOD, True, True), 6)
    expected = sight_of(begins[:, :-1].tolist(), True, True)
    assert batch.positions is not None and torch.equal(batch.positions, expected.positions)
    assert batch.document_bounds is not None
    assert torch.equal(seen(batch.document_bounds, 6, 15), expected.visible)


class Counting:
    """Returns rows that contain the number of the step; the third step is an error."""

    def __init__(self) -> None:
        self.steps = 0

    def read(self) -> SampleRows:
        if self.steps == 2:
            raise UserError("the data ends here")
        self.steps += 1
        return SampleRows(np.full((4, 6), self.steps), None)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}


def test_reading_ahead_does_not_advance_the_state() -> None:
    reader = Counting()
    loader = GlobalBatchLoader(reader, BatchShape(5, 4, 2), DocumentRules(), 8)
    assert loader.reader_state == {"steps": 0}
    first = next(loader)
    assert [batch.tokens.unique().tolist() for batch in first] == [[1], [1]]
    deadline = time.monotonic() + patient(10)
    while reader.steps < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (reader.steps, loader.reader_state, loader.consumed_samples) == (2, {"steps": 1}, 12)
    next(loader)
    with pytest.raises(UserError, match="the data ends here"):
        next(loader)
    assert loader.reader_state == {"steps": 2}
    loader.close()


def test_a_middle_stage_counts_samples() -> None:
    loader = UnreadBatches(BatchShape(5, 8, 2, data_parallel_size=2), 8)
    assert [batch.tokens.numel() for batch in next(loader)] == [0, 0]
    assert loader.consumed_samples == 16


SEQ_LENGTH = 4
GLOBAL_BATCH = 12
ORDER = OrderOptions(SEQ_LENGTH, seed=1)


def source_of(make_dataset: MakeDataset) -> SampleSource:
    return SampleSource(make_dataset([7, 30, 2, 60]), range(4), SEQ_LENGTH, seed=3, shuffle=True)


def loader_of(
    source: SampleSource, micro: int, rank: int, size: int, consumed: int = 0, vocab_size: int = 100
) -> GlobalBatchLoader:
    shape = BatchShape(SEQ_LENGTH, GLOBAL_BATCH, micro, size)
    reader = SampleReader(source, shape, rank, consumed, vocab_size)
    return GlobalBatchLoader(reader, shape, DocumentRules(), consumed)


def global_batch(source: SampleSource, micro: int, size: int, consumed: int) -> torch.Tensor:
    """Return the samples of one optimizer step in their order, from the rows of all ranks."""
    ranks = [next(loader_of(source, micro, rank, size, consumed)) for rank in range(size)]
    assert all(batch.tokens.shape == batch.labels.shape == (micro, SEQ_LENGTH) for own in ranks for batch in own)
    steps = zip(*ranks, strict=True)
    return torch.cat([torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1) for step in steps for batch in step])


@pytest.mark.parametrize("consumed", [0, 12, 24, 36, 7])
def test_a_global_batch_does_not_depend_on_the_layout(make_dataset: MakeDataset, consumed: int) -> None:
    source = source_of(make_dataset)
    assert len(source) == 24
    expected = source.samples(np.arange(consumed, consumed + GLOBAL_BATCH)).tokens.tolist()
    for micro, size in ((1, 1), (12, 1), (4, 3), (1, 12), (2, 3), (3, 2), (6, 2), (1, 4)):
        assert global_batch(source, micro, size, consumed).tolist() == expected


def test_reading_resumes_where_it_stopped(make_dataset: MakeDataset) -> None:
    source = source_of(make_dataset)
    whole = loader_of(source, 2, 1, 3)
    steps = [next(whole) for _ in range(5)]
    stopped = loader_of(source, 2, 1, 3)
    for _ in range(2):
        next(stopped)
    assert stopped.consumed_samples == 2 * GLOBAL_BATCH
    resumed = loader_of(source, 2, 1, 3, consumed=stopped.consumed_samples)
    for expected, found in zip(steps[2:], resumed, strict=False):
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(expected, found, strict=True))


def test_id_outside_of_the_vocabulary(make_dataset: MakeDataset) -> None:
    source = source_of(make_dataset)
    assert source.samples(torch.arange(24).numpy()).tokens.max() == 98
    list(zip(range(2), loader_of(source, 12, 0, 1, vocab_size=99), strict=False))
    with pytest.raises(UserError, match=r"numbers: holds token id 9\d, the vocabulary has ids 0 to 97"):
        list(zip(range(2), loader_of(source, 12, 0, 1, vocab_size=98), strict=False))


def test_validation_sets_have_names(make_dataset: MakeDataset) -> None:
    train, one, two = (make_dataset([50 + 10 * number], str(number)).prefix for number in range(3))

    def valid(*words: Any) -> dict[str, list[int]]:
        sources = open_sources(DataConfig(train_data_path=(train,), valid_data_path=tuple(map(Path, words))), ORDER)
        return {name: [member.tokens for member in source.sources] for name, source in sources.valid.items()}

    assert valid(f"web={one}", "code=", two) == {"web": [60], "code": [70]}
    assert valid(f"a-1.b={two}", "mix=1", one, "3", two) == {"a-1.b": [70], "mix": [60, 70]}
    assert valid("1", one, "3", two) == {"": [60, 70]}
    for words, problem in (
        ((one, f"code={two}"), f"--valid-data-path {one}: this set has no name, others do: write NAME={one}"),
        ((f"a={one}", f"a={two}"), f"--valid-data-path a={two}: the name a is given twice"),
        ((f"a={one}", "b="), "--valid-data-path b=: names no data set"),
    ):
        assert errors_of(valid, *words)[0].startswith(problem)


def test_sidecar_must_name_the_tokenizer(
    make_dataset: MakeDataset, sentencepiece_tokenizer: SentencePieceTokenizer
) -> None:
    dataset, tokenizer = make_dataset([50]), sentencepiece_tokenizer

    def check(used: Tokenizer = tokenizer) -> None:
        check_tokenizer(open_sources(DataConfig(data_path=(dataset.prefix,), split="1,0,0"), ORDER).datasets, used)

    check()
    right = Sidecar(tokenizer.kind, tokenizer.sha256, tokenizer.vocab_size, 2, True, 49, 1, 50)
    write_sidecar(dataset.prefix, right)
    check()
    for wrong in (replace(right, vocab_size=599), replace(right, tokenizer_sha256="0" * 64)):
        write_sidecar(dataset.prefix, wrong)
        with pytest.raises(UserError, match="--tokenizer-model .*tiny.model .* is not the tokenizer of"):
            check()
    with pytest.raises(UserError, match="--tokenizer-type ByteTokenizer .* is not the tokenizer of"):
        check(ByteTokenizer())
    write_sidecar(dataset.prefix, replace(right, tokens=51))
    with pytest.raises(UserError, match="describes 1 documents and 51 tokens, the data set has 1 and 50"):
        check()


def test_a_sidecar_of_a_later_release_and_a_missing_one(make_dataset: MakeDataset) -> None:
    prefix = make_dataset([50]).prefix
    sidecar = Sidecar("HuggingFaceTokenizer", "ab", 100, 0, False, 49, 1, 50)
    write_sidecar(prefix, sidecar)
    values = json.loads(sidecar_path(prefix).read_text())
    sidecar_path(prefix).write_text(json.dumps(values | {"checksum": "new"}))
    assert read_sidecar(prefix) == sidecar
    names = ("largest_id", "eod_id")
    wrong_types = [json.dumps(values | {name: value}) for name in names for value in ("9", None, 1.5)]
    deep = "[" * 100_000 + "]" * 100_000
    for text in (json.dumps(values | {"format_version": 2}), "{", "[]", '{"format_version": 1}', deep, *wrong_types):
        sidecar_path(prefix).write_text(text)
        with pytest.raises(UserError, match=r"numbers\.json: not the sidecar"):
            read_sidecar(prefix)
