"""The order of samples. It is final: it depends on the data, the sequence length and the seed alone, never
on how long the run is, on batch sizes or on how many ranks read.

Epoch e: the documents are permuted by the stream (seed, e, DOCUMENTS) and joined; the joined tokens are cut
into samples of seq_length + 1 tokens, each beginning with the last token of the one before (so that every
token but the first is a target once); what is left over at the end is dropped; the samples are permuted by
the stream (seed, e, SAMPLES). Every epoch has the same number of samples, so sample n of a run is sample
n % len of epoch n // len.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.errors import UserError

DOCUMENTS, SAMPLES = 0, 1
"""Purposes of the random streams of an epoch."""


def permutation(size: int, seed: int, epoch: int, purpose: int) -> NDArray[np.int64]:
    """The stable argsort of `size` raw 64-bit draws of PCG64(SeedSequence([seed, epoch, purpose])).

    Defined by raw draws because NumPy keeps bit streams the same across versions, but not `shuffle`.
    Computed by sorting the draws with their lowest bits replaced by the position: that is twice as fast as
    an argsort, and only draws that agree in all their higher bits are then left to be told apart.

    Raises:
        UserError: when the seed is negative.
    """
    if seed < 0:
        raise UserError(f"--seed {seed}: expected 0 or more")
    stream = np.random.PCG64(np.random.SeedSequence([seed, epoch, purpose]))
    draws: NDArray[np.uint64] = stream.random_raw(size)
    position_mask = np.uint64((1 << max(size - 1, 0).bit_length()) - 1)
    keys = (draws & ~position_mask) | np.arange(size, dtype=np.uint64)
    keys.sort()
    order = (keys & position_mask).astype(np.int64)
    keys &= ~position_mask
    same_as_next = keys[1:] == keys[:-1]
    in_tie = np.zeros(size, dtype=bool)
    in_tie[1:] |= same_as_next
    in_tie[:-1] |= same_as_next
    tied = np.flatnonzero(in_tie)
    candidates = order[tied]
    order[tied] = candidates[np.argsort(draws[candidates], kind="stable")]
    return order


def parse_split(text: str) -> tuple[float, float, float]:
    """`969,30,1` -> shares of train, valid and test that add up to 1; missing ones are 0.

    Raises:
        UserError: when the text is not one to three numbers, none negative and not all zero.
    """
    try:
        shares = [float(share) for share in text.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    total = sum(shares)
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < total < float("inf"):
        raise UserError(f"--split {text}: expected shares of train, valid and test such as 969,30,1")
    train, valid, test = (share / total for share in (*shares, 0.0, 0.0)[:3])
    return train, valid, test


def split_documents(shares: tuple[float, float, float], documents: int) -> tuple[range, range, range]:
    """Cuts documents 0 .. documents - 1 in their order, rounded as Megatron does.

    Each share is rounded on its own; what the rounding added or lost is taken from all three ends alike.
    """
    ends = np.cumsum([0, *(round(share * documents) for share in shares)])
    ends[1:] -= ends[-1] - documents
    # With an empty first share Megatron's correction can point before the first document.
    first, second, third, fourth = (int(end) for end in ends.clip(0))
    return range(first, second), range(second, third), range(third, fourth)


class SampleRows(NamedTuple):
    """Samples as they lie in the data: each is seq_length tokens to read and, one further, their labels."""

    tokens: NDArray[Any]
    """[n, seq_length + 1], integers"""
    loss_mask: NDArray[np.uint8] | None
    """[n, seq_length + 1]: 1 where the token counts as a label; None where all do"""


class Samples(Protocol):
    """An endless, randomly accessible run of samples."""

    seq_length: int

    @property
    def name(self) -> str:
        """Which data it is, for messages."""
        ...

    def samples(self, numbers: NDArray[np.int64], out: SampleRows | None = None) -> SampleRows:
        """Samples of the run by their numbers [n] >= 0.

        Args:
            out: arrays to fill and return, tokens of any integer type that holds the data's, and a loss mask
                or none just as the data has one; left out, new ones in the data's own type.
        """
        ...


class _Epoch(NamedTuple):
    """The order of one epoch; D documents, S samples."""

    number: int
    documents: NDArray[np.int64]
    """[D] documents in the order in which they are joined."""
    starts: NDArray[np.int64]
    """[D + 1] where each begins in the joined tokens."""
    samples: NDArray[np.int64]
    """[S] cut numbers in the order in which they are read."""


class _Pieces(NamedTuple):
    """Runs of tokens to copy; each [pieces]."""

    sources: NDArray[np.int64]
    """Where each begins in the file."""
    targets: NDArray[np.int64]
    """Where each begins in the flat result."""
    lengths: NDArray[np.int64]


def _copy_pieces(data: NDArray[Any], pieces: _Pieces, out: NDArray[Any]) -> None:
    """Slice by slice: a gather through an index of every token takes four times as long."""
    flat = out.reshape(-1)
    source_ends, target_ends = pieces.sources + pieces.lengths, pieces.targets + pieces.lengths
    for begin, end, to, to_end in zip(
        pieces.sources.tolist(), source_ends.tolist(), pieces.targets.tolist(), target_ends.tolist(), strict=True
    ):
        flat[to:to_end] = data[begin:end]


class SampleSource:
    """An endless, randomly accessible run of samples over a range of documents.

    Holds the order of one epoch at a time: 16 bytes a document and 8 a sample.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        seq_length: int,
        seed: int,
        shuffle: bool,
        part: str = "train",
    ) -> None:
        """
        Args:
            documents: which documents belong to this source, contiguous.
            shuffle: permute as the head of this file says; else documents and samples in their own order.
            part: what the source is for (train, valid, test), for messages.

        Raises:
            UserError: when the documents have fewer than seq_length + 1 tokens.
        """
        self.dataset = dataset
        self.documents = documents
        self.seq_length = seq_length
        self.seed = seed
        self.shuffle = shuffle
        bounds = dataset.document_bounds
        self.tokens = int(bounds[documents.stop] - bounds[documents.start])
        if self.tokens < seq_length + 1:
            raise UserError(
                f"{dataset.prefix}: the {part} part ({len(documents)} documents) has {self.tokens} tokens, "
                f"{seq_length + 1} are needed for one sample: give more text, a shorter --seq-length, or "
                "another --split"
            )
        self._epoch = self._build_epoch(0)

    def __len__(self) -> int:
        """Samples of an epoch."""
        return (self.tokens - 1) // self.seq_length

    @property
    def name(self) -> str:
        """The data set's prefix."""
        return str(self.dataset.prefix)

    def sample(self, number: int) -> NDArray[Any]:
        """Tokens of sample `number` >= 0 of the run [seq_length + 1], in the data set's own type."""
        tokens: NDArray[Any] = self.samples(np.array([number], dtype=np.int64)).tokens[0]
        return tokens

    def samples(self, numbers: NDArray[np.int64], out: SampleRows | None = None) -> SampleRows:
        """See Samples. Numbers of one epoch side by side spare rebuilding the order."""
        if len(numbers) and int(numbers.min()) < 0:
            raise IndexError(f"sample {numbers.min()} of {self.name}")
        rows = self._empty_rows(len(numbers)) if out is None else self._checked(out, len(numbers))
        epochs = numbers // len(self)
        for epoch in np.unique(epochs):
            chosen = np.flatnonzero(epochs == epoch)
            pieces = self._find_pieces(int(epoch), numbers[chosen] % len(self), chosen)
            _copy_pieces(self.dataset.tokens, pieces, rows.tokens)
            if self.dataset.loss_mask is not None and rows.loss_mask is not None:
                _copy_pieces(self.dataset.loss_mask, pieces, rows.loss_mask)
        return rows

    def _empty_rows(self, count: int) -> SampleRows:
        shape = (count, self.seq_length + 1)
        mask = None if self.dataset.loss_mask is None else np.empty(shape, np.uint8)
        return SampleRows(np.empty(shape, self.dataset.tokens.dtype), mask)

    def _checked(self, out: SampleRows, count: int) -> SampleRows:
        """Raises ValueError when `out` cannot be filled."""
        if (out.loss_mask is None) != (self.dataset.loss_mask is None):
            raise ValueError(f"{self.name}: a loss mask must be given just where the data has one")
        for array in (out.tokens, out.loss_mask):
            if array is not None and (array.shape != (count, self.seq_length + 1) or not array.flags.c_contiguous):
                raise ValueError(f"{self.name}: expected a contiguous array {(count, self.seq_length + 1)} to fill")
        return out

    def _find_pieces(
        self, epoch_number: int, places: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> "_Pieces":
        """Where the samples at `places` [n] of an epoch lie in the file, each in one or several documents, and
        where they go in the flat result, of which they are the rows `rows` [n]."""
        if self.shuffle and epoch_number != self._epoch.number:
            self._epoch = self._build_epoch(epoch_number)
        epoch = self._epoch
        begins = epoch.samples[places] * self.seq_length
        ends = begins + self.seq_length + 1
        # Documents first .. last (both included) of each sample; "right" steps over empty ones.
        first = np.searchsorted(epoch.starts, begins, side="right") - 1
        last = np.searchsorted(epoch.starts, ends, side="left") - 1
        counts = last - first + 1
        owner = np.repeat(np.arange(len(places)), counts)
        piece = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + first[owner]
        piece_begin = np.maximum(epoch.starts[piece], begins[owner])
        lengths = np.minimum(epoch.starts[piece + 1], ends[owner]) - piece_begin
        sources = self.dataset.document_bounds[epoch.documents[piece]] + piece_begin - epoch.starts[piece]
        targets = rows[owner] * (self.seq_length + 1) + piece_begin - begins[owner]
        return _Pieces(sources, targets, lengths)

    def _build_epoch(self, number: int) -> _Epoch:
        if self.shuffle:
            documents = permutation(len(self.documents), self.seed, number, DOCUMENTS)
            samples = permutation(len(self), self.seed, number, SAMPLES)
        else:
            documents = np.arange(len(self.documents))
            samples = np.arange(len(self))
        bounds = self.dataset.document_bounds[self.documents.start : self.documents.stop + 1]
        starts = np.zeros(len(documents) + 1, np.int64)
        np.cumsum(np.diff(bounds)[documents], out=starts[1:])
        return _Epoch(number, documents + self.documents.start, starts, samples)
