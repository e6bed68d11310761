"""Blends of data sets."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megatron_ladder.config.sections import DataConfig
from megatron_ladder.data.blending import _MAX_TURNS, BlendedSource, _turns_of, _whole_weights, parse_blend
from megatron_ladder.data.loader import OrderOptions, open_sources
from megatron_ladder.data.samples import SampleRows, SampleSource
from megatron_ladder.errors import UserError
from tests.helpers.tokens import MakeDataset

SEQ_LENGTH = 4
ORDER = OrderOptions(SEQ_LENGTH, seed=7)


def largest_deviation(weights: list[int], turns: list[int]) -> Fraction:
    """Return the largest |c_i - w_i n| over all n and data sets, counted one by one."""
    counts, worst = [0] * len(weights), 0
    for taken, turn in enumerate(turns, 1):
        counts[turn] += 1
        of_this = (abs(count * sum(weights) - weight * taken) for count, weight in zip(counts, weights, strict=True))
        worst = max(worst, *of_this)
    return Fraction(worst, sum(weights))


def test_no_data_set_is_a_sample_ahead_or_behind() -> None:
    generator = np.random.default_rng(0)
    cases = [generator.integers(1, 60, generator.integers(2, 8)).tolist() for _ in range(150)]
    for weights in [*cases, [1, 1], [1] * 9, [50] + [1] * 50, [999, 1], [3, 2]]:
        turns = _turns_of(weights).tolist()
        assert [turns.count(i) for i in range(len(weights))] == weights
        assert largest_deviation(weights, turns) <= 1 - Fraction(1, 2 * len(weights) - 2), weights


def test_weights_of_a_long_period_are_rounded() -> None:
    weights = [Fraction(123_456_789), Fraction(987_654_321), Fraction(1)]
    whole = _whole_weights(weights)
    assert sum(whole) == _MAX_TURNS and whole[2] == 1
    for given, rounded in zip(weights, whole, strict=True):
        assert abs(given / sum(weights) - Fraction(rounded, _MAX_TURNS)) < Fraction(2, _MAX_TURNS)


def test_a_blend_keeps_the_order_of_each_data_set(make_dataset: MakeDataset) -> None:
    sets = [make_dataset([30, 9], "a"), make_dataset([70], "b", vocab_size=100)]
    sources = [SampleSource(one, range(len(one)), SEQ_LENGTH, 7, shuffle=True) for one in sets]
    blended = BlendedSource(sources, [Fraction("0.3"), Fraction("0.7")])
    taken, expected = [0, 0], []
    for turn in [1, 0, 1, 1, 0, 1, 1, 1, 0, 1] * 6:
        expected.append(sources[turn].samples(np.array([taken[turn]])).tokens[0].tolist())
        taken[turn] += 1
    numbers = np.random.default_rng(1).permutation(len(expected))
    rows = blended.samples(numbers)
    assert rows.tokens.dtype == np.int32 and rows.loss_mask is None
    assert rows.tokens.tolist() == [expected[number] for number in numbers]
    out = SampleRows(np.empty((60, 5), np.int64), None)
    blended.fill(np.arange(60), np.arange(60), out)
    assert out.tokens.tolist() == expected


@pytest.mark.parametrize("words", ["1 a 2", "1 a b 2", "a 1 2 b", "0 a 1 b", "-1 a 1 b", "nan a 1 b", "1 a 2 a", "a a"])
def test_invalid_blends(words: str) -> None:
    with pytest.raises(UserError, match="--data-path"):
        parse_blend("data_path", words.split())


@pytest.mark.parametrize("words", ["a 1 b 1", "a 1 b 2", "a 1"])
def test_weights_after_their_paths_are_no_paths(words: str) -> None:
    with pytest.raises(UserError, match=f"--data-path {words}: expected paths only, or a weight before each path"):
        parse_blend("data_path", words.split())


def test_every_data_set_of_a_blend_is_split(make_dataset: MakeDataset) -> None:
    a, b = make_dataset([10] * 10, "a").prefix, make_dataset([5] * 20, "b").prefix
    sources = open_sources(DataConfig(data_path=(Path("2"), a, Path("1"), b), split="8,2,0"), ORDER)
    assert [member.documents for member in sources.train.sources] == [range(8), range(16)]
    assert [member.documents for member in sources.valid[""].sources] == [range(8, 10), range(16, 20)]
    assert sources.train.weights == [2, 1] and sources.train.sources[0].shuffle
    assert [one.prefix for one in sources.datasets] == [a, b]
    c = make_dataset([50], "c").prefix
    unweighted = open_sources(DataConfig(data_path=(a, c), split="1"), ORDER).train
    assert [len(member) for member in unweighted.sources] == [24, 12] and unweighted.weights == [2, 1]
