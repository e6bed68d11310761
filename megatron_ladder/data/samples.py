"""The order of samples. It is final: it depends on the data, the sequence length and the seed alone, never
on how long the run is, on batch sizes or on how many ranks read.

Epoch e: the documents are permuted by the stream (seed, e, DOCUMENTS) and joined; the joined tokens are cut
into samples of seq_length + 1 tokens, each beginning with the last token of the one before (so that every
token but the first is a target once); what is left over at the end is dropped; the samples are permuted by
the stream (seed, e, SAMPLES). Every epoch has the same number of samples, so sample n of a run is sample
n % len of epoch n // len.
"""

from typing import Any, NamedTuple

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


class _Epoch(NamedTuple):
    """The order of one epoch; D documents, S samples."""

    number: int
    documents: NDArray[np.int64]
    """[D] documents in the order in which they are joined."""
    starts: NDArray[np.int64]
    """[D + 1] where each begins in the joined tokens."""
    samples: NDArray[np.int64]
    """[S] cut numbers in the order in which they are read."""


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

    def sample(self, number: int) -> NDArray[Any]:
        """Sample `number` >= 0 of the run [seq_length + 1], in the data set's own type."""
        tokens: NDArray[Any] = self.samples(np.array([number], dtype=np.int64))[0]
        return tokens

    def samples(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Samples of the run by their numbers [n] >= 0: [n, seq_length + 1], in the data set's own type.

        Numbers of one epoch side by side spare rebuilding the order.
        """
        if len(numbers) and int(numbers.min()) < 0:
            raise IndexError(f"sample {numbers.min()} of {self.dataset.prefix}")
        epochs = numbers // len(self)
        result = np.empty((len(numbers), self.seq_length + 1), self.dataset.tokens.dtype)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._read(int(epoch), numbers[chosen] % len(self))
        return result

    def _read(self, epoch_number: int, places: NDArray[np.int64]) -> NDArray[Any]:
        """Samples at `places` [n] of an epoch: [n, seq_length + 1]."""
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
        piece_length = np.minimum(epoch.starts[piece + 1], ends[owner]) - piece_begin
        source = self.dataset.document_bounds[epoch.documents[piece]] + piece_begin - epoch.starts[piece]
        target = np.cumsum(piece_length) - piece_length
        in_file = np.arange(len(places) * (self.seq_length + 1)) + np.repeat(source - target, piece_length)
        tokens: NDArray[Any] = self.dataset.tokens[in_file].reshape(len(places), self.seq_length + 1)
        return tokens

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
