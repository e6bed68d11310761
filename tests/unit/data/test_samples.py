from collections.abc import Callable

import numpy as np
import pytest

from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.samples import SampleSource, parse_split, permutation, split_documents
from megatron_ladder.errors import UserError

MakeDataset = Callable[..., IndexedDataset]

SEQ_LENGTH = 4
LENGTHS = [3, 0, 11, 1, 1, 7, 0, 20, 2, 0]


def by_definition(size: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch, purpose])).random_raw(size)
    return np.argsort(draws, kind="stable")


def epoch_by_hand(lengths: list[int], seq_length: int, seed: int, epoch: int) -> list[list[int]]:
    """Samples of an epoch, token by token, of documents whose tokens count up from 0."""
    begins = np.cumsum([0, *lengths])
    joined = [
        token
        for document in by_definition(len(lengths), seed, epoch, 0)
        for token in range(begins[document], begins[document + 1])
    ]
    cuts = [joined[at : at + seq_length + 1] for at in range(0, len(joined) - seq_length, seq_length)]
    return [cuts[number] for number in by_definition(len(cuts), seed, epoch, 1)]


def test_permutation_is_frozen() -> None:
    # Written down when the order was made final; another order would be another training run.
    assert permutation(10, 1234, 0, 0).tolist() == [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]
    assert permutation(10, 1234, 0, 1).tolist() == [7, 3, 0, 2, 4, 6, 5, 1, 9, 8]
    assert permutation(10, 1234, 1, 0).tolist() == [9, 2, 0, 7, 6, 1, 8, 4, 5, 3]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 1024, 1025])
def test_permutation_is_the_stable_argsort(size: int) -> None:
    assert permutation(size, 7, 3, 1).tolist() == by_definition(size, 7, 3, 1).tolist()


def test_permutation_with_draws_that_agree_in_their_high_bits() -> None:
    size, seed = 1 << 21, 19
    draws = np.sort(np.random.PCG64(np.random.SeedSequence([seed, 0, 0])).random_raw(size))
    assert np.any(np.diff(draws >> np.uint64(21)) == 0), "the seed was chosen to have such draws"
    assert np.array_equal(permutation(size, seed, 0, 0), by_definition(size, seed, 0, 0))


def test_negative_seed_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="--seed -1"):
        permutation(3, -1, 0, 0)


def test_samples_equal_the_definition_over_three_epochs(make_dataset: MakeDataset) -> None:
    source = SampleSource(make_dataset(LENGTHS), range(len(LENGTHS)), SEQ_LENGTH, seed=5, shuffle=True)
    expected = [sample for epoch in range(3) for sample in epoch_by_hand(LENGTHS, SEQ_LENGTH, 5, epoch)]
    assert len(source) * 3 == len(expected)
    assert source.samples(np.arange(len(expected))).tolist() == expected
    backwards = np.arange(len(expected))[::-1]
    assert source.samples(backwards).tolist() == expected[::-1]
    assert [source.sample(n).tolist() for n in range(len(expected))] == expected


@pytest.mark.parametrize("seq_length", [1, 2, 5, 21, 43])
def test_every_token_is_a_target_once_an_epoch(make_dataset: MakeDataset, seq_length: int) -> None:
    lengths = [3, 0, 11, 1, 1, 7, 0, 20, 1]
    source = SampleSource(make_dataset(lengths), range(len(lengths)), seq_length, seed=1, shuffle=True)
    for epoch in range(2):
        read = source.samples(np.arange(len(source)) + epoch * len(source))
        targets = read[:, 1:].reshape(-1)
        left_out = sum(lengths) - len(targets)
        assert len(set(targets.tolist())) == len(targets)
        assert 1 <= left_out <= seq_length


def test_a_range_of_documents_reads_nothing_else(make_dataset: MakeDataset) -> None:
    source = SampleSource(make_dataset([4, 6, 5, 9]), range(1, 3), 3, seed=0, shuffle=True)
    assert set(source.samples(np.arange(len(source))).reshape(-1).tolist()) <= set(range(4, 15))


def test_unshuffled_source_reads_in_order_and_wraps_around(make_dataset: MakeDataset) -> None:
    source = SampleSource(make_dataset([3, 4]), range(2), 2, seed=9, shuffle=False)
    once = [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    assert source.samples(np.arange(7)).tolist() == [*once, *once, once[0]]


def test_epochs_and_seeds_differ(make_dataset: MakeDataset) -> None:
    dataset = make_dataset([10] * 50)
    source = SampleSource(dataset, range(50), 4, seed=1, shuffle=True)
    other = SampleSource(dataset, range(50), 4, seed=2, shuffle=True)
    numbers = np.arange(len(source))
    assert not np.array_equal(source.samples(numbers), source.samples(numbers + len(source)))
    assert not np.array_equal(source.samples(numbers), other.samples(numbers))


def test_part_that_is_too_short(make_dataset: MakeDataset) -> None:
    dataset = make_dataset([3, 2])
    SampleSource(dataset, range(2), 4, seed=0, shuffle=True)
    with pytest.raises(
        UserError, match=r"numbers: the valid part \(2 documents\) has 5 tokens, 6 are needed"
    ):
        SampleSource(dataset, range(2), 5, seed=0, shuffle=True, part="valid")


@pytest.mark.parametrize(
    ("text", "documents", "sizes"),
    [
        ("969,30,1", 1000, (969, 30, 1)),
        ("969,30,1", 10, (10, 0, 0)),
        ("100,0,0", 7, (7, 0, 0)),
        ("100", 7, (7, 0, 0)),
        ("50/50", 3, (1, 2, 0)),  # 2 and 2 by rounding half to even; one too many is taken from every end
        ("1,1,1", 1, (1, 0, 0)),
        ("1,1,1", 10, (4, 3, 3)),
        ("0,1,1", 3, (0, 1, 2)),
    ],
)
def test_split_is_rounded_as_megatron_does(text: str, documents: int, sizes: tuple[int, ...]) -> None:
    parts = split_documents(parse_split(text), documents)
    assert tuple(map(len, parts)) == sizes
    assert [number for part in parts for number in part] == list(range(documents))


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf,1"])
def test_split_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match="--split"):
        parse_split(text)


def test_order_does_not_hang_on_the_file_type(make_dataset: MakeDataset) -> None:
    narrow = SampleSource(make_dataset(LENGTHS, "narrow", 100), range(10), SEQ_LENGTH, 3, True)
    wide = SampleSource(make_dataset(LENGTHS, "wide"), range(10), SEQ_LENGTH, 3, True)
    assert narrow.dataset.tokens.dtype != wide.dataset.tokens.dtype
    assert narrow.samples(np.arange(30)).tolist() == wide.samples(np.arange(30)).tolist()
