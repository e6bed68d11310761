from unittest import mock

import numpy as np
import pytest
import torch

from megatron_ladder.data.batches import BatchShape, DocumentRules, GlobalBatchLoader, make_micro_batches
from megatron_ladder.data.samples import SampleRows
from megatron_ladder.errors import UserError
from tests.helpers.patience import wait_until
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
@pytest.mark.parametrize("marked", [False, True])
def test_documents_match_megatron(positions: bool, attention: bool, loss: bool, marked: bool) -> None:
    """Data may mark the beginnings of documents, which override end tokens, and labels that count."""
    rows, counted = rows_with_ends(1), torch.ones(2, 15)
    begins = np.random.default_rng(3).random(rows.tokens.shape) < 0.3
    if marked:
        lengths = np.arange(11, 17)
        rows = rows._replace(
            begins=begins, loss_mask=np.tile(np.arange(16) % 2, (6, 1)).astype(np.uint8), lengths=lengths
        )
        # The label of place t is token t + 1.
        counted *= (torch.arange(15) + 1) % 2
    batches = make_micro_batches(rows, DocumentRules(EOD, positions, attention, loss), 2)
    assert len(batches) == 3
    for number, batch in enumerate(batches):
        chosen = slice(2 * number, 2 * number + 2)
        both = torch.from_numpy(rows.tokens[chosen].astype(np.int64))
        assert torch.equal(batch.tokens, both[:, :-1]) and torch.equal(batch.labels, both[:, 1:])
        begun = begins[chosen, :-1].tolist() if marked else begins_after(batch.tokens, EOD)
        expected = sight_of(begun, positions, attention)
        assert same(batch.positions, expected.positions if positions else None)
        assert same(batch.loss_mask, counted * loss_mask_of(batch.tokens, EOD) if loss else counted if marked else None)
        # A full row has one token more than its inputs.
        assert same(batch.lengths, torch.tensor([11, 12, 13, 14, 15, 15])[chosen] if marked else None)
        bounds = batch.document_bounds
        assert (bounds is not None) == attention
        if bounds is not None:
            assert bounds.dtype == torch.int32 and {0, 15, 30} <= set(bounds.tolist())
            assert torch.equal(seen(bounds, 2, 15), expected.visible)


def same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    return found is expected if found is None or expected is None else torch.equal(found, expected)


def seen(bounds: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Return which tokens each token attends to [rows, length, length]."""
    number = torch.bucketize(torch.arange(rows * length), bounds, right=True).view(rows, length)
    earlier = torch.ones(length, length).tril().bool()
    return (number[:, :, None] == number[:, None, :]) & earlier


def test_reading_ahead_does_not_advance_the_state() -> None:
    reader = mock.Mock()
    steps = (SampleRows(np.full((4, 6), step), None) for step in (1, 2))
    reader.read.side_effect = [*steps, UserError("the data ends here")]
    reader.state = lambda: {"steps": reader.read.call_count}
    loader = GlobalBatchLoader(reader, BatchShape(4, 2), DocumentRules(), 8)
    assert loader.reader_state == {"steps": 0}
    first = next(loader)
    assert [batch.tokens.unique().tolist() for batch in first] == [[1], [1]]
    wait_until(lambda: reader.read.call_count >= 2, 10)
    assert (reader.read.call_count, loader.reader_state, loader.consumed_samples) == (2, {"steps": 1}, 12)
    next(loader)
    with pytest.raises(UserError, match="the data ends here"):
        next(loader)
    assert loader.reader_state == {"steps": 2}
    loader.close()


def test_rows_received_ahead_do_not_advance_the_state() -> None:
    reader, group = mock.Mock(), mock.Mock(broadcast_object=mock.Mock(side_effect=lambda rows: rows))
    reader.read.side_effect = [SampleRows(np.full((4, 6), 1), None), UserError("the data ends here")]
    reader.state = lambda: {"steps": reader.read.call_count}
    loader = GlobalBatchLoader(reader, BatchShape(4, 2), DocumentRules(), group=group)
    loader.receive_ahead()
    loader.receive_ahead()
    assert (group.broadcast_object.call_count, loader.reader_state, loader.consumed_samples) == (1, {"steps": 0}, 0)
    assert [batch.tokens.unique().tolist() for batch in next(loader)] == [[1], [1]]
    assert (group.broadcast_object.call_count, loader.reader_state, loader.consumed_samples) == (1, {"steps": 1}, 4)
    # An error belongs to the step that would read the rows.
    loader.receive_ahead()
    with pytest.raises(UserError, match="the data ends here"):
        next(loader)
    loader.close()
