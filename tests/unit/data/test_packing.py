import itertools

import numpy as np
import pytest

from megatron_ladder.data.indexed import IndexedDataset, Sidecar, loss_mask_path, write_sidecar
from megatron_ladder.data.loader import OrderOptions, open_source
from megatron_ladder.data.packing import LossOn, PackedSource, _pack
from megatron_ladder.data.samples import SampleSource
from megatron_ladder.errors import UserError
from tests.helpers.tokens import MakeDataset

LENGTHS = [7, 3, 9, 2, 2, 1, 14, 4, 0, 8, 3]
SEQ_LENGTH, PAD = 9, 99
ROOM = SEQ_LENGTH + 1


@pytest.fixture
def dataset(make_dataset: MakeDataset) -> IndexedDataset:
    """Return conversations whose tokens count up from 0; multiples of three are the assistant's."""
    prefix = make_dataset(LENGTHS).prefix
    loss_mask_path(prefix).write_bytes(bytes(token % 3 == 0 for token in range(sum(LENGTHS))))
    return IndexedDataset(prefix)


def conversations() -> list[list[int]]:
    """Return the truncated conversations."""
    ends = list(itertools.accumulate(LENGTHS))
    whole = [list(range(end - length, end)) for length, end in zip(LENGTHS, ends, strict=True)]
    return [tokens[:ROOM] for tokens in whole if tokens]


@pytest.mark.parametrize("room", [1, 2, 10, 97])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_filled_nearly_optimally(room: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, room + 1, 300)
    row_of = _pack(lengths, room)
    fill = np.bincount(row_of, weights=lengths)
    assert fill.max() <= room and fill.min() > 0
    # Best fit decreasing never needs more than 11/9 of the best packing's rows, and 4 (Johnson, 1973).
    assert len(fill) <= 11 / 9 * max(np.ceil(lengths.sum() / room), (lengths > room / 2).sum()) + 4
    assert np.array_equal(_pack(lengths, room), row_of)


def test_an_epoch_contains_every_conversation_once(dataset: IndexedDataset) -> None:
    source = PackedSource(dataset, range(len(LENGTHS)), SEQ_LENGTH, seed=1, shuffle=True, pad_id=PAD)
    assert (source.conversations, source.cut, source.tokens) == (10, 1, sum(LENGTHS))
    assert source.without_targets == sum(all(token % 3 for token in tokens[1:]) for tokens in conversations()) == 3
    assert source.filled == (sum(LENGTHS) - 4) / (len(source) * ROOM)
    orders = []
    for epoch in range(3):
        rows = source.samples(np.arange(len(source)) + epoch * len(source))
        assert rows.loss_mask is not None and rows.begins is not None and rows.lengths is not None
        assert rows.lengths.tolist() == (rows.tokens != PAD).sum(1).tolist()
        found = []
        for tokens, mask, begins in zip(rows.tokens, rows.loss_mask, rows.begins, strict=True):
            for piece in np.split(np.arange(ROOM), np.flatnonzero(begins)[1:]):
                if tokens[piece[0]] == PAD:
                    assert set(tokens[piece]) == {PAD} and not mask[piece].any()
                else:
                    found.append(tokens[piece].tolist())
                    assert mask[piece].tolist() == [0, *(int(token % 3 == 0) for token in tokens[piece][1:])]
        assert sorted(found) == conversations()
        orders.append(rows.tokens.tolist())
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1] != orders[2]
    again = PackedSource(dataset, range(len(LENGTHS)), SEQ_LENGTH, seed=1, shuffle=True, pad_id=PAD)
    assert again.samples(np.arange(3 * len(source)).reshape(3, -1)[::-1].ravel()).tokens.tolist() == [
        row for order in orders[::-1] for row in order
    ]


def test_a_part_and_a_loss_on_all(dataset: IndexedDataset) -> None:
    source = PackedSource(dataset, range(2, 6), SEQ_LENGTH, seed=1, shuffle=False, loss_on="all", pad_id=PAD)
    rows = source.samples(np.arange(len(source)))
    assert rows.loss_mask is not None
    # 9 and 1 fill a row; 2 and 2 share one.
    assert rows.tokens.tolist() == [[*range(10, 19), 23], [19, 20, 21, 22, *[PAD] * 6]]
    assert rows.loss_mask.tolist() == [[0, *[1] * 8, 0], [0, 1, 0, 1, *[0] * 6]]


def test_data_in_which_no_label_counts_is_rejected(dataset: IndexedDataset) -> None:
    """The only targets of the conversation of 14 tokens are its first one and those after a row's end."""
    mask = np.zeros(sum(LENGTHS), np.uint8)
    mask[[24, 24 + ROOM, 37]] = 1
    loss_mask_path(dataset.prefix).write_bytes(mask.tobytes())
    cut = IndexedDataset(dataset.prefix)
    with pytest.raises(
        UserError, match="numbers: no conversation of the train part has a token of the assistant among"
    ):
        PackedSource(cut, range(len(LENGTHS)), SEQ_LENGTH, 1, False)
    assert PackedSource(cut, range(len(LENGTHS)), SEQ_LENGTH + 1, 1, False).without_targets == 9
    SampleSource(cut, range(6, 7), SEQ_LENGTH, 1, False)
    with pytest.raises(UserError, match="numbers: no token of the valid part counts by its loss mask"):
        SampleSource(cut, range(6), SEQ_LENGTH, 1, False, "valid")


def open_whole(dataset: IndexedDataset, loss_on: LossOn | None = None) -> SampleSource | PackedSource:
    return open_source("train", dataset, range(len(LENGTHS)), OrderOptions(SEQ_LENGTH, 1, loss_on=loss_on))


def test_the_sidecar_marks_conversations(dataset: IndexedDataset) -> None:
    text = open_whole(dataset)
    assert isinstance(text, SampleSource) and text.samples(np.arange(2)).loss_mask is not None
    everything = open_whole(IndexedDataset(dataset.prefix), "all")
    assert isinstance(everything, SampleSource) and everything.samples(np.arange(2)).loss_mask is None
    sidecar = Sidecar("HuggingFaceTokenizer", "ab", 100, 5, False, 52, 11, sum(LENGTHS), conversations=True)
    write_sidecar(dataset.prefix, sidecar)
    for loss_on, expected in ((None, "assistant"), ("assistant", "assistant"), ("all", "all")):
        packed = open_whole(IndexedDataset(dataset.prefix), loss_on)
        assert isinstance(packed, PackedSource) and (packed.loss_on, packed.pad_id) == (expected, 5)
    loss_mask_path(dataset.prefix).unlink()
    bare = IndexedDataset(dataset.prefix)
    assert open_whole(bare, "all").samples(np.arange(2)).begins is not None
    for asked in (None, "assistant"):
        with pytest.raises(UserError, match=r"numbers_loss_mask\.bin: no such file, .*numbers\.json: .*--loss-on all"):
            open_whole(bare, asked)
