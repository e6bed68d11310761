"""Samples out of whole conversations: as many as fit lie one after the other, and the rest is padding.

A row holds seq_length + 1 tokens. Which conversations share one is decided once for the data set: the longest first,
each into the row with the least room that takes it (best fit decreasing), conversations of one length together, so
that the work follows the number of lengths and not that of conversations. A longer conversation is cut at the end of
its row. In a row conversations lie in the order of the data set.

Epoch e: the rows are permuted by the stream (seed, e, SAMPLES); sample n of a run is row n % len of epoch n // len.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.fingerprint import content_of
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.samples import SAMPLES, SampleRows, SampleSource, permutation, rows_to_fill
from megatron_ladder.data.sidecar import missing_loss_mask, read_sidecar
from megatron_ladder.errors import UserError

PACKED_ORDER = "packed conversations"
LossOn = Literal["all", "assistant"]
"""Values of --loss-on."""


def pack(lengths: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Which row each conversation lies in, [conversations]; rows are numbered from 0, without gaps.

    Args:
        lengths: tokens of each conversation, 1 to `room`.
        room: tokens that a row holds.
    """
    by_length = np.argsort(-lengths, kind="stable")
    present, counts = np.unique(-lengths, return_counts=True)
    row_of = np.empty(len(lengths), np.int64)
    rows_with_room: list[list[NDArray[np.int64]]] = [[] for _ in range(room + 1)]
    # Bit r is set where some row has room for r tokens: the least that suffices is then one shift away.
    rooms, rows, begin = 0, 0, 0
    for negative, count in zip(present.tolist(), counts.tolist(), strict=True):
        length, waiting = -negative, by_length[begin : begin + count]
        begin += count
        while len(waiting):
            sufficient = rooms >> length
            if not sufficient:
                opened = -(-len(waiting) // (room // length))
                rows_with_room[room].append(np.arange(rows, rows + opened))
                rows, rooms = rows + opened, rooms | 1 << room
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


def no_loss_mask(dataset: IndexedDataset) -> str:
    """A mistake, in words."""
    return f"--loss-on assistant: {dataset.prefix} does not tell whose tokens are whose: preprocess it with --chat"


class PackedSource:
    """An endless, randomly accessible run of rows of whole conversations; used as `SampleSource` is.

    Attributes:
        tokens: of the conversations, those that are cut off included.
        conversations: how many there are.
        cut: those that are longer than a row.
        filled: share of the rows that is no padding.
    """

    has_loss_mask = True
    has_begins = True

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
        """
        Args:
            documents: which conversations belong to this source, contiguous.
            shuffle: permute rows as the head of this file says; else rows in their own order.
            part: what the source is for (train, valid, test), for messages.
            loss_on: which tokens count as labels: those that the data set's loss mask names, or all. The first of a
                conversation never does, nor does padding.
            pad_id: fills rows up.

        Raises:
            UserError: no conversation at all, or `assistant` and a data set without a loss mask.
        """
        self.dataset, self.documents, self.seq_length = dataset, documents, seq_length
        self.seed, self.shuffle, self.loss_on, self.pad_id = seed, shuffle, loss_on, pad_id
        if loss_on == "assistant" and dataset.loss_mask is None:
            raise UserError(no_loss_mask(dataset))
        bounds = dataset.document_bounds[documents.start : documents.stop + 1]
        lengths = np.diff(bounds)
        present = np.flatnonzero(lengths)
        if not len(present):
            raise UserError(f"{dataset.prefix}: the {part} part has no conversation: give more, or another --split")
        self.tokens = int(bounds[-1] - bounds[0])
        self.cut = int((lengths > seq_length + 1).sum())
        self.conversations = len(present)
        kept = np.minimum(lengths[present], seq_length + 1)
        row_of = pack(kept, seq_length + 1)
        by_row = np.argsort(row_of, kind="stable")
        self._conversations = present[by_row] + documents.start
        self._firsts = np.searchsorted(row_of[by_row], np.arange(int(row_of.max()) + 2))
        self.filled = int(kept.sum()) / (len(self) * (seq_length + 1))
        self._epoch = -1
        self._order = np.arange(len(self))

    def __len__(self) -> int:
        """Rows, which are the samples of an epoch."""
        return len(self._firsts) - 1

    @property
    def name(self) -> str:
        """The data set's prefix."""
        return str(self.dataset.prefix)

    @property
    def sources(self) -> "tuple[PackedSource, ...]":
        """Itself: a blend of one."""
        return (self,)

    def describe(self) -> dict[str, Any]:
        """See SampleSource."""
        documents = [self.documents.start, self.documents.stop]
        one = {"prefix": self.name, "documents": documents, "content": content_of(self.dataset)}
        return {"order": PACKED_ORDER, "sets": [one]}

    @property
    def token_dtype(self) -> "np.dtype[Any]":
        """The data set's own."""
        return self.dataset.tokens.dtype

    def samples(self, numbers: NDArray[np.int64], out: SampleRows | None = None) -> SampleRows:
        """Rows by their numbers [n] >= 0, with their loss mask and where conversations begin.

        Args:
            out: arrays to fill and return; new ones if left out.
        """
        if len(numbers) and int(numbers.min()) < 0:
            raise IndexError(f"sample {numbers.min()} of {self.name}")
        rows = rows_to_fill(self, len(numbers), out)
        self.fill(numbers, np.arange(len(numbers)), rows)
        return rows

    def fill(self, numbers: NDArray[np.int64], places: NDArray[np.int64], out: SampleRows) -> None:
        """Writes rows by their numbers [n] into the rows `places` [n] of `out`."""
        epochs = numbers // len(self)
        for epoch in np.unique(epochs):
            self._permute(int(epoch))
            for number, place in zip(numbers[epochs == epoch], places[epochs == epoch], strict=True):
                self._fill_row(int(self._order[number % len(self)]), int(place), out)

    def _permute(self, epoch: int) -> None:
        if self.shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(len(self), self.seed, epoch, SAMPLES)

    def _fill_row(self, row: int, place: int, out: SampleRows) -> None:
        tokens, mask, begins = out.tokens[place], out.loss_mask, out.begins
        end = 0
        for conversation in self._conversations[self._firsts[row] : self._firsts[row + 1]].tolist():
            begin, first = end, int(self.dataset.document_bounds[conversation])
            end = begin + min(int(self.dataset.document_bounds[conversation + 1]) - first, len(tokens))
            tokens[begin:end] = self.dataset.tokens[first : first + end - begin]
            if mask is not None:
                counts = self.dataset.loss_mask if self.loss_on == "assistant" else None
                mask[place, begin:end] = 1 if counts is None else counts[first : first + end - begin]
                mask[place, begin] = 0
            if begins is not None:
                begins[place, begin:end] = False
                begins[place, begin] = True
        tokens[end:] = self.pad_id
        if mask is not None:
            mask[place, end:] = 0
        if begins is not None:
            # Padding is a document of its own: what nobody sees costs attention least.
            begins[place, end:] = False
            begins[place, end : end + 1] = True


def choose_labels(dataset: IndexedDataset, loss_on: LossOn | None) -> LossOn:
    """Which tokens of a data set count as labels: as asked, else those of the assistant where the data tells them.

    Raises:
        UserError: the data set lacks the loss mask that this needs.
    """
    if loss_on == "all" or dataset.loss_mask is not None:
        return loss_on or "assistant"
    missing = missing_loss_mask(dataset, read_sidecar(dataset.prefix))
    if missing is not None:
        raise UserError(f"{missing}: copy it as well, or give --loss-on all to train on every token")
    if loss_on == "assistant":
        raise UserError(no_loss_mask(dataset))
    return "all"


def open_source(
    dataset: IndexedDataset,
    documents: range,
    seq_length: int,
    seed: int,
    shuffle: bool,
    part: str,
    loss_on: LossOn | None = None,
    cache: Path | None = None,
) -> "SampleSource | PackedSource":
    """Samples of texts, or packed conversations where the data set's sidecar says that it holds such.

    Args:
        loss_on: which tokens count as labels; None: those of the assistant where the data set tells them.
        cache: folder in which the orders of texts are kept.

    Raises:
        UserError: as the two sources do, and as `choose_labels`.
    """
    sidecar = read_sidecar(dataset.prefix)
    loss_on = choose_labels(dataset, loss_on)
    if sidecar is not None and sidecar.conversations:
        return PackedSource(
            dataset, documents, seq_length, seed, shuffle, part, loss_on=loss_on, pad_id=sidecar.eod_id
        )
    if loss_on == "all":
        dataset.loss_mask = None
    return SampleSource(dataset, documents, seq_length, seed, shuffle, part, cache)
