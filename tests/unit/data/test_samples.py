import os

import numpy as np
import pytest

from megatron_ladder.data.indexed import IndexedDataset, bin_path, loss_mask_path
from megatron_ladder.data.loader import _parse_split, _split_documents
from megatron_ladder.data.packing import PackedSource
from megatron_ladder.data.samples import SampleSource, permutation
from megatron_ladder.errors import UserError
from tests.helpers.runs import errors_of
from tests.helpers.tokens import MakeDataset

SEQ_LENGTH = 4
LENGTHS = [3, 0, 11, 1, 1, 7, 0, 20, 2, 0]


def by_definition(size: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch, purpose])).random_raw(size)
    return np.argsort(draws, kind="stable")


def epoch_by_hand(lengths: list[int], seq_length: int, seed: int, epoch: int) -> list[list[int]]:
    """Build the samples of an epoch token by token, for documents whose tokens count up from 0."""
    begins = np.cumsum([0, *lengths])
    joined = [
        token
        for document in by_definition(len(lengths), seed, epoch, 0)
        for token in range(begins[document], begins[document + 1])
    ]
    cuts = [joined[at : at + seq_length + 1] for at in range(0, len(joined) - seq_length, seq_length)]
    return [cuts[number] for number in by_definition(len(cuts), seed, epoch, 1)]


def test_the_permutation_is_stable_across_releases() -> None:
    # Recorded when the order became final; another order would change training runs.
    assert permutation(10, 1234, 0, 0).tolist() == [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]
    assert permutation(10, 1234, 0, 1).tolist() == [7, 3, 0, 2, 4, 6, 5, 1, 9, 8]
    assert permutation(10, 1234, 1, 0).tolist() == [9, 2, 0, 7, 6, 1, 8, 4, 5, 3]


def test_samples_equal_the_definition_over_three_epochs(make_dataset: MakeDataset) -> None:
    dataset = make_dataset(LENGTHS)
    # Every third token counts; the tokens are their positions in the file.
    loss_mask_path(dataset.prefix).write_bytes((np.arange(len(dataset.tokens)) % 3 == 0).astype(np.uint8).tobytes())
    source = SampleSource(IndexedDataset(dataset.prefix), range(len(LENGTHS)), SEQ_LENGTH, seed=5, shuffle=True)
    expected = [sample for epoch in range(3) for sample in epoch_by_hand(LENGTHS, SEQ_LENGTH, 5, epoch)]
    assert len(source) * 3 == len(expected)
    for numbers in (np.arange(len(expected)), np.arange(len(expected))[::-1], np.arange(len(expected))):
        rows = source.samples(numbers)
        assert rows.tokens.tolist() == [expected[number] for number in numbers]
        assert rows.loss_mask is not None and rows.loss_mask.dtype == np.uint8
        assert np.array_equal(rows.loss_mask, rows.tokens % 3 == 0)


def test_unshuffled_source_reads_in_order_and_wraps_around(make_dataset: MakeDataset) -> None:
    source = SampleSource(make_dataset([3, 4]), range(2), 2, seed=9, shuffle=False)
    once = [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    assert source.samples(np.arange(7)).tokens.tolist() == [*once, *once, once[0]]


def test_files_that_are_truncated_while_they_are_read(make_dataset: MakeDataset) -> None:
    """Reading them would end the process with SIGBUS, or return zeros for the last page."""
    prefix = make_dataset([4000] * 5).prefix
    mask = bytes([1]) * 20_000
    loss_mask_path(prefix).write_bytes(mask)
    for path, size in ((loss_mask_path(prefix), 20_000), (bin_path(prefix), 80_000)):
        source = SampleSource(IndexedDataset(prefix), range(5), 9, seed=0, shuffle=False)
        packed = PackedSource(source.dataset, range(5), 9, seed=0, shuffle=False, pad_id=0)
        for left in (size - 1, 0):
            os.truncate(path, left)
            for samples in (source, packed):
                (error,) = errors_of(samples.samples, np.array([len(samples) - 1]))
                assert error.startswith(f"{path}: {left} bytes found, {size} when it was opened")
        path.write_bytes(mask if size == len(mask) else bytes(size))


def test_a_part_that_is_too_short(make_dataset: MakeDataset) -> None:
    dataset = make_dataset([3, 2])
    SampleSource(dataset, range(2), 4, seed=0, shuffle=True)
    with pytest.raises(UserError, match=r"numbers: the valid part \(2 documents\) has 5 tokens, 6 are needed"):
        SampleSource(dataset, range(2), 5, seed=0, shuffle=True, part="valid")


@pytest.mark.parametrize(
    ("text", "documents", "sizes"),
    [
        ("969,30,1", 1000, (969, 30, 1)),
        ("969,30,1", 10, (10, 0, 0)),
        ("100,0,0", 7, (7, 0, 0)),
        ("100", 7, (7, 0, 0)),
        ("50/50", 3, (1, 2, 0)),  # 2 and 2 by rounding half to even; the surplus is subtracted from every end
        ("1,1,1", 1, (1, 0, 0)),
        ("1,1,1", 10, (4, 3, 3)),
        ("0,1,1", 3, (0, 1, 2)),
    ],
)
def test_splits_are_rounded_as_in_megatron(text: str, documents: int, sizes: tuple[int, ...]) -> None:
    parts = _split_documents(_parse_split(text), documents)
    assert tuple(map(len, parts)) == sizes
    assert [number for part in parts for number in part] == list(range(documents))


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf,1"])
def test_invalid_splits(text: str) -> None:
    with pytest.raises(UserError, match="--split"):
        _parse_split(text)
