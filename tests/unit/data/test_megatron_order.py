"""Megatron-LM core's order of samples, compared with a slow implementation token by token."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ladder.config.run import parse_run, resolve_run
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.loader import DataArguments, OrderOptions, open_sources
from megatron_ladder.data.megatron_order import _greedy_turns, _MegatronSource, _split_sequences
from megatron_ladder.errors import UserError

MakeDataset = Callable[..., IndexedDataset]
LENGTHS = [3, 11, 1, 0, 7, 20, 2, 5]
SEQ_LENGTH, SEED = 4, 1234


def epochs_for(samples: int | None, tokens: int) -> int:
    epochs = 1
    while samples is not None and epochs * tokens < samples * SEQ_LENGTH + 1:
        epochs += 1
    return epochs


def run_by_hand(lengths: list[int], first_token: int, samples: int | None) -> list[list[int]]:
    """Return all samples of a run over documents whose tokens count up from `first_token`."""
    tokens = sum(lengths)
    epochs = epochs_for(samples, tokens)
    apart = False
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // SEQ_LENGTH
        apart = samples - before < int(0.80 * ((tokens - 1) // SEQ_LENGTH))
    state = np.random.RandomState(SEED)

    def shuffled(numbers: list[int]) -> list[int]:
        array = np.array(numbers, dtype=np.int32)
        state.shuffle(array)
        return array.tolist()

    own = list(range(len(lengths)))
    documents = shuffled(own * (epochs - 1)) + shuffled(own) if apart else shuffled(own * epochs)
    begins = [first_token + sum(lengths[:document]) for document in own]
    joined = [begins[document] + place for document in documents for place in range(lengths[document])]
    cuts = [joined[at : at + SEQ_LENGTH + 1] for at in range(0, len(joined) - SEQ_LENGTH, SEQ_LENGTH)]
    numbers = list(range(len(cuts)))
    order = shuffled(numbers[:before]) + shuffled(numbers[before:]) if apart else shuffled(numbers)
    return [cuts[number] for number in order]


@pytest.mark.parametrize(
    ("samples", "epochs", "is_apart"),
    [
        (None, 1, False),
        (1, 1, False),
        (12, 1, False),
        (13, 2, True),
        (20, 2, True),
        (21, 2, False),
        (23, 2, False),
        (24, 2, False),
        (25, 3, True),
        (60, 5, False),
    ],
)
def test_runs_of_several_lengths(make_dataset: MakeDataset, samples: int | None, epochs: int, is_apart: bool) -> None:
    # 49 tokens: 12 samples per epoch; after E - 1 epochs (49 (E - 1) - 1) // 4; the threshold is int(0.8 x 12) = 9
    # samples of the last epoch.
    source = _MegatronSource(make_dataset(LENGTHS), range(8), SEQ_LENGTH, SEED, samples)
    assert source.epochs == epochs == epochs_for(samples, 49)
    expected = run_by_hand(LENGTHS, 0, samples)
    assert len(source) == len(expected) >= (samples or 0)
    assert source.samples(np.arange(len(source))).tokens.tolist() == expected
    last_documents = source._order_of(0).documents[-8:]
    assert (sorted(last_documents.tolist()) == list(range(8))) == (is_apart or epochs == 1)
    with pytest.raises(IndexError, match="samples in Megatron's order"):
        source.samples(np.array([len(source)]))


def shared(*words: object) -> DataArguments:
    return DataArguments(list(map(str, words)), (), (), ())


@pytest.mark.parametrize("size", [41, 56, 66])
def test_a_weighted_blend(make_dataset: MakeDataset, size: int) -> None:
    # Data set a provides 17 of 56 and 20 of 66 samples, so it is built for 18 and 21: below and above 80%.
    lengths = {"a": LENGTHS, "b": [9, 4, 30], "c": [6] * 5}
    words = [
        word
        for name, weight in zip("abc", (30, 50, 20), strict=True)
        for word in (weight, make_dataset(lengths[name], name).prefix)
    ]
    order = OrderOptions(SEQ_LENGTH, SEED, megatron_samples={"train": size})
    weights = [0.3, 0.5, 0.2]
    wanted = [math.ceil(size * weight) for weight in weights]
    runs = [run_by_hand(lengths[name], 0, math.ceil(count * 1.005)) for name, count in zip("abc", wanted, strict=True)]
    taken, expected = [0, 0, 0], []
    for sample in range(sum(wanted)):
        behind = [weight * max(sample, 1) - count for weight, count in zip(weights, taken, strict=True)]
        turn = behind.index(max(behind))
        expected.append(runs[turn][taken[turn]])
        taken[turn] += 1
    train = open_sources(shared(*words), "1", order, ["train"]).train
    assert train.samples(np.arange(size)).tokens.tolist() == expected[:size]
    described = train.describe()
    assert described["run_samples"] == sum(wanted) and [one["weight"] for one in described["sets"]] == weights


def test_data_sets_without_weights_are_read_once(make_dataset: MakeDataset) -> None:
    a, b = make_dataset(LENGTHS, "a").prefix, make_dataset([40], "b").prefix
    runs = [run_by_hand(LENGTHS, 0, None), run_by_hand([40], 0, None)]
    train = open_sources(shared(a, b), "1", OrderOptions(SEQ_LENGTH, SEED, {"train": 21}), ["train"]).train
    turns = _greedy_turns([12 / 21, 9 / 21], 21).tolist()
    expected = [runs[turn][turns[:place].count(turn)] for place, turn in enumerate(turns)]
    assert train.samples(np.arange(21)).tokens.tolist() == expected
    with pytest.raises(UserError, match="--megatron-order: the run reads 22 train samples, the data sets have 21"):
        open_sources(shared(a, b), "1", OrderOptions(SEQ_LENGTH, SEED, {"train": 22}), ["train"])


def test_splits_are_rounded_as_in_megatron_core(make_dataset: MakeDataset) -> None:
    # Cumulated shares of 10 sequences: 0.969 -> 9.69 -> 10; the legacy rule would give (10, 0, 0) too, and of 5
    # sequences cut 50/50 core rounds 2.5 to 2.
    assert _split_sequences((0.969, 0.030, 0.001), 10) == [range(10), range(10, 10), range(10, 10)]
    assert _split_sequences((0.5, 0.5, 0.0), 5) == [range(2), range(2, 5), range(5, 5)]
    prefix = make_dataset([10] * 5).prefix
    order = OrderOptions(SEQ_LENGTH, SEED, {"train": 4, "valid": 4, "test": 4})
    sources = open_sources(shared(prefix), "1,1", order)
    assert (sources.train.documents, sources.valid[""].documents, sources.test) == (range(2), range(2, 5), None)


@pytest.mark.parametrize("samples", [1, 5, 14, 40])
def test_validation_is_shuffled_over_all_evaluations(make_dataset: MakeDataset, samples: int) -> None:
    # Of 9 sequences, the shares 0.5 and 0.5 are 0-3 and 4-8: 22 and 61 tokens.
    lengths = [*LENGTHS, 34]
    prefix = make_dataset(lengths).prefix
    order = OrderOptions(SEQ_LENGTH, SEED, {"train": 7, "valid": samples})
    valid = open_sources(shared(prefix), "1,1", order, ["train", "valid"]).valid[""]
    expected = run_by_hand(lengths[4:], sum(lengths[:4]), samples)
    assert valid.samples(np.arange(len(expected))).tokens.tolist() == expected
    own = DataArguments((), [str(prefix)], [str(prefix)], ())
    whole = open_sources(own, "1", order, ["train", "valid"])
    for part, count in ((whole.train, 7), (whole.valid[""], samples)):
        assert part.samples(np.arange(count)).tokens.tolist() == run_by_hand(lengths, 0, count)[:count]


def test_every_evaluation_reads_the_samples_after_those_of_the_one_before() -> None:
    """Megatron keeps one iterator over validation data, which a resumed run continues."""
    flags = "--seq-length 16 --hidden-size 32 --num-attention-heads 4 --lr 1e-3 --vocab-size 50 --global-batch-size 4 "
    for iterations, interval in ((10, 5), (11, 5), (3, 5), (5, 1)):
        words = f"{flags} --train-iters {iterations} --eval-interval {interval} --eval-iters 3"
        run, own = (resolve_run(parse_run(f"{words} {order}".split()), 50, 1) for order in ("--megatron-order", ""))
        consumed, starts = 0, {}
        for iteration in range(1, iterations + 1):
            if iteration % interval == 0:
                starts[iteration], consumed = consumed, consumed + 12
        starts.setdefault(iterations, consumed)
        assert {iteration: run.validation_start(iteration) for iteration in starts} == starts
        assert run.validation_samples == (iterations // interval + 1) * 12 >= starts[iterations] + 12
        assert own.validation_start(iterations) == 0


def write_sequences(prefix: Path, documents: list[int]) -> Path:
    """Sequences of 5, 6, 7 and 8 tokens that count up, and the first sequence of each document."""
    idx = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + b"\x08" + np.array([4, 3], "<u8").tobytes()
    idx += np.array([5, 6, 7, 8], "<i4").tobytes() + np.array([0, 10, 22, 36], "<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(idx + np.array(documents, "<i8").tobytes())
    Path(f"{prefix}.bin").write_bytes(np.arange(26, dtype="<u2").tobytes())
    return prefix


def test_megatron_uses_sequences_as_documents(tmp_path: Path) -> None:
    prefix = write_sequences(tmp_path / "s", [0, 3, 4])
    train = open_sources(shared(prefix), "1", OrderOptions(SEQ_LENGTH, SEED, {"train": 10}), ["train"]).train
    assert train.samples(np.arange(10)).tokens.tolist() == run_by_hand([5, 6, 7, 8], 0, 10)[:10]
    # Half of 4 sequences ends inside the first document.
    order = OrderOptions(SEQ_LENGTH, SEED, {"train": 2, "valid": 2})
    sources = open_sources(shared(prefix), "1,1", order, ["train", "valid"])
    assert (sources.train.documents, sources.valid[""].documents) == (range(2), range(2, 4))
