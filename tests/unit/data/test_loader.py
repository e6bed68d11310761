import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ladder.config.sections import DataConfig
from megatron_ladder.data.batches import BatchShape, DocumentRules, GlobalBatchLoader, SampleReader
from megatron_ladder.data.indexed import Sidecar, read_sidecar, sidecar_path, write_sidecar
from megatron_ladder.data.loader import OrderOptions, check_tokenizer, open_sources
from megatron_ladder.data.samples import SampleSource
from megatron_ladder.errors import UserError
from megatron_ladder.tokenizers.kinds import ByteTokenizer, Tokenizer
from megatron_ladder.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.helpers.runs import errors_of
from tests.helpers.tokens import MakeDataset

SEQ_LENGTH = 4
GLOBAL_BATCH = 12
ORDER = OrderOptions(SEQ_LENGTH, seed=1)


def source_of(make_dataset: MakeDataset) -> SampleSource:
    return SampleSource(make_dataset([7, 30, 2, 60]), range(4), SEQ_LENGTH, seed=3, shuffle=True)


def loader_of(
    source: SampleSource, micro: int, rank: int, size: int, consumed: int = 0, vocab_size: int = 100
) -> GlobalBatchLoader:
    shape = BatchShape(GLOBAL_BATCH, micro, size)
    reader = SampleReader(source, shape, rank, consumed, vocab_size)
    return GlobalBatchLoader(reader, shape, DocumentRules(), consumed)


def global_batches(source: SampleSource, micro: int, size: int, consumed: int) -> torch.Tensor:
    """Return the samples of two optimizer steps in their order, from the rows of all ranks."""
    loaders = [loader_of(source, micro, rank, size, consumed) for rank in range(size)]
    ranks = [[*next(loader), *next(loader)] for loader in loaders]
    assert {loader.consumed_samples for loader in loaders} == {consumed + 2 * GLOBAL_BATCH}
    assert all(batch.tokens.shape == batch.labels.shape == (micro, SEQ_LENGTH) for own in ranks for batch in own)
    steps = zip(*ranks, strict=True)
    return torch.cat([torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1) for step in steps for batch in step])


@pytest.mark.parametrize("consumed", [0, 36, 7])
def test_global_batches_do_not_depend_on_the_layout(make_dataset: MakeDataset, consumed: int) -> None:
    source = source_of(make_dataset)
    assert len(source) == 24
    expected = source.samples(np.arange(consumed, consumed + 2 * GLOBAL_BATCH)).tokens.tolist()
    for micro, size in ((1, 1), (12, 1), (4, 3), (1, 12), (2, 3), (3, 2), (6, 2), (1, 4)):
        assert global_batches(source, micro, size, consumed).tolist() == expected


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
    with pytest.raises(UserError, match="describes 1 document and 51 tokens, the data set has 1 and 50"):
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
