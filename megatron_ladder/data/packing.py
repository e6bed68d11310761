"""Samples of whole conversations: a row contains as many as fit, followed by padding.

A row has seq_length + 1 tokens. Conversations are assigned to rows once per data set by best fit decreasing: longest
first, each into the row with the least sufficient room. Conversations of equal length are assigned together, so that
the run time depends on the number of different lengths, not of conversations. A conversation that is longer than a row
is truncated. Within a row, conversations keep the order of the data set.

In epoch e the rows are permuted by the random stream (seed, e, SAMPLES); sample n of a run is row n % len of epoch
n // len.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.indexed import IndexedDataset, documents_with_targets
from megatron_ladder.data.samples import SAMPLES, DatasetSamples, SampleRows
from megatron_ladder.errors import Problem, UserError

LossOn = Literal["all", "assistant"]
"""Values of --loss-on."""


def _pack(lengths: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Return the row of each conversation; `lengths` are at most `room`, the tokens of a row. All rows are used."""
    by_length = np.argsort(-lengths, kind="stable")
    present, counts = np.unique(-lengths, return_counts=True)
    row_of = np.empty(len(lengths), np.int64)
    rows_with_room: list[list[NDArray[np.int64]]] = [[] for _ in range(room + 1)]
    # Bit r is set if some row has room for r tokens, so a shift finds the least sufficient room.
    rooms = 0
    rows = begin = 0
    for negative, count in zip(present.tolist(), counts.tolist(), strict=True):
        length = -negative
        waiting = by_length[begin : begin + count]
        begin += count
        while len(waiting):
            sufficient = rooms >> length
            if not sufficient:
                opened = -(-len(waiting) // (room // length))
                rows_with_room[room].append(np.arange(rows, rows + opened))
                rows += opened
                rooms |= 1 << room
                continue
            least = length + (sufficient & -sufficient).bit_length() - 1
            taken = rows_with_room[least].pop()
            if len(taken) > len(waiting):
                rows_with_room[least].append(taken[len(waiting) :])
                taken = taken[: len(waiting)]
            if not rows_with_room[least]:
                rooms &= ~(1 << least)
            row_of[waiting[: len(taken)]] = taken
            waiting = waiting[len(taken) :]
            if least > length:
                rows_with_room[least - length].append(taken)
                rooms |= 1 << least - length
    return row_of


class PackedSource(DatasetSamples):
    """Rows of whole conversations.

    `tokens` includes those cut off, `cut` counts conversations longer than a row, `filled` is the share of non-padding.
    """

    order = "packed conversations"
    has_loss_mask = has_begins = True

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        seq_length: int,
        seed: int,
        shuffle: bool,
        part: str = "train",
        *,
        loss_on: LossOn = "assistant",
        pad_id: int = 0,
    ) -> None:
        """Raises UserError if there is no conversation, or none with a label that counts; `part` is for messages.

        `loss_on` selects the tokens that count as labels: all, or those of the data set's loss mask. The first token of
        a conversation and padding never count.
        """
        super().__init__(dataset, documents, seq_length, seed, shuffle)
        self.loss_on = loss_on
        self.pad_id = pad_id
        # Conversations, which are not empty, cut to a row.
        bounds = dataset.document_bounds[documents.start : documents.stop + 1]
        lengths = np.diff(bounds)
        present = np.flatnonzero(lengths)
        if not len(present):
            reason = "{prefix}: the {part} part has no conversation"
            raise UserError(Problem({}, reason, "give more, or another {split}", prefix=dataset.prefix, part=part))
        cut_lengths = np.minimum(lengths[present], seq_length + 1)
        begins = bounds[:-1][present]
        # Those with a label.
        mask = dataset.loss_mask
        if loss_on == "all" or mask is None:
            counts = cut_lengths > 1
        else:
            counts = documents_with_targets(mask, begins, begins + cut_lengths)
        self.without_targets = len(present) - int(counts.sum())
        if self.without_targets == len(present):
            first = f"a token of the assistant among its first {seq_length + 1} tokens"
            reason = "{prefix}: no conversation of the {part} part has {first}, so there is nothing to learn"
            fix = "raise {seq_length}, or give other data"
            raise UserError(Problem({}, reason, fix, prefix=dataset.prefix, part=part, first=first))
        self.tokens = int(bounds[-1] - bounds[0])
        self.cut = int((lengths > seq_length + 1).sum())
        self.conversations = len(present)
        row_of = _pack(cut_lengths, seq_length + 1)
        by_row = np.argsort(row_of, kind="stable")
        self._conversations = present[by_row] + documents.start
        self._firsts = np.searchsorted(row_of[by_row], np.arange(int(row_of.max()) + 2))
        self.filled = int(cut_lengths.sum()) / (len(self) * (seq_length + 1))

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        return self._permutation(len(self), epoch, SAMPLES)

    def _fill_epoch(self, epoch: int, places: NDArray[np.int64], rows: NDArray[np.int64], out: SampleRows) -> None:
        assert out.loss_mask is not None and out.begins is not None and out.lengths is not None
        bounds = self.dataset.document_bounds
        counts = None if self.loss_on == "all" else self.dataset.loss_mask
        for packed, row in zip(self._order_of(epoch)[places].tolist(), rows.tolist(), strict=True):
            tokens = out.tokens[row]
            mask = out.loss_mask[row]
            begins = out.begins[row]
            begins[:] = False
            end = 0
            for conversation in self._conversations[self._firsts[packed] : self._firsts[packed + 1]].tolist():
                begin = end
                first = int(bounds[conversation])
                end = begin + min(int(bounds[conversation + 1]) - first, len(tokens))
                copied = slice(first, first + end - begin)
                tokens[begin:end] = self.dataset.tokens[copied]
                mask[begin:end] = 1 if counts is None else counts[copied]
                mask[begin] = 0
                begins[begin] = True
            out.lengths[row] = end
            tokens[end:] = self.pad_id
            mask[end:] = 0
            # Padding is a separate document, which costs attention least.
            begins[end : end + 1] = True
