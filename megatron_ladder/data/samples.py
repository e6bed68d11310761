"""The order of samples. It is final: it depends on the data, the sequence length and the seed alone, never
on how long the run is, on batch sizes or on how many ranks read.

Epoch e: the documents are permuted by the stream (seed, e, DOCUMENTS) and joined; the joined tokens are cut
into samples of seq_length + 1 tokens, each beginning with the last token of the one before (so that every
token but the first is a target once); what is left over at the end is dropped; the samples are permuted by
the stream (seed, e, SAMPLES). Every epoch has the same number of samples, so sample n of a run is sample
n % len of epoch n // len.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.fingerprint import content_of
from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.order_cache import load_or_build
from megatron_ladder.errors import UserError

ORDER = "ladder-1"
"""The name of this order, in checkpoints and in the cache."""

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
    keys = draws & ~position_mask
    keys |= np.arange(size, dtype=np.uint64)
    keys.sort()
    order = (keys & position_mask).view(np.int64)
    keys &= ~position_mask
    same_as_next = np.flatnonzero(keys[1:] == keys[:-1])
    if len(same_as_next):
        tied = np.union1d(same_as_next, same_as_next + 1)
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
    begins: NDArray[np.bool_] | None = None
    """[n, seq_length + 1]: where a document begins; None where that is after each end-of-document token"""


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


class _HasShape(Protocol):
    """What decides the arrays that samples are read into."""

    seq_length: int

    @property
    def name(self) -> str: ...
    @property
    def token_dtype(self) -> "np.dtype[Any]": ...
    @property
    def has_loss_mask(self) -> bool: ...
    @property
    def has_begins(self) -> bool: ...


def rows_to_fill(source: _HasShape, count: int, out: SampleRows | None) -> SampleRows:
    """New arrays for `count` samples, or those given.

    Raises:
        ValueError: when the given ones cannot be filled.
    """
    shape = (count, source.seq_length + 1)
    if out is None:
        mask = np.empty(shape, np.uint8) if source.has_loss_mask else None
        begins = np.empty(shape, np.bool_) if source.has_begins else None
        return SampleRows(np.empty(shape, source.token_dtype), mask, begins)
    if (out.loss_mask is not None) != source.has_loss_mask:
        raise ValueError(f"{source.name}: a loss mask must be given just where the data has one")
    for array in out:
        if array is not None and (array.shape != shape or not array.flags.c_contiguous):
            raise ValueError(f"{source.name}: expected a contiguous array {shape} to fill, found {array.shape}")
    return out


class Order(NamedTuple):
    """The order of one epoch; D documents, S samples."""

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
        cache: Path | None = None,
    ) -> None:
        """
        Args:
            documents: which documents belong to this source, contiguous.
            shuffle: permute as the head of this file says; else documents and samples in their own order.
            part: what the source is for (train, valid, test), for messages.
            cache: folder in which shuffled orders are kept, see order_cache.py; None: each process builds its own.

        Raises:
            UserError: when the documents have fewer than seq_length + 1 tokens.
        """
        self.dataset = dataset
        self.documents = documents
        self.seq_length = seq_length
        self.seed = seed
        self.shuffle = shuffle
        self.cache = cache
        self.bounds = self._document_bounds()
        self.tokens = int(self.bounds[documents.stop] - self.bounds[documents.start])
        if self.tokens < seq_length + 1:
            raise UserError(
                f"{dataset.prefix}: the {part} part ({len(documents)} documents) has {self.tokens} tokens, "
                f"{seq_length + 1} are needed for one sample: give more text, a shorter --seq-length, or "
                "another --split"
            )
        self._held: tuple[int, Order] | None = None

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

    has_begins = False

    @property
    def sources(self) -> "tuple[SampleSource, ...]":
        """Itself: a blend of one."""
        return (self,)

    @property
    def token_dtype(self) -> "np.dtype[Any]":
        """Type of the data's tokens."""
        return self.dataset.tokens.dtype

    @property
    def has_loss_mask(self) -> bool:
        """Whether the data says which tokens count as labels."""
        return self.dataset.loss_mask is not None

    def samples(self, numbers: NDArray[np.int64], out: SampleRows | None = None) -> SampleRows:
        """See Samples. Numbers of one epoch side by side spare rebuilding the order."""
        rows = rows_to_fill(self, len(numbers), out)
        self.fill(numbers, np.arange(len(numbers)), rows)
        return rows

    def fill(self, numbers: NDArray[np.int64], rows: NDArray[np.int64], out: SampleRows) -> None:
        """Writes samples by their numbers [n] >= 0 into the rows `rows` [n] of `out`."""
        if len(numbers) and int(numbers.min()) < 0:
            raise IndexError(f"sample {numbers.min()} of {self.name}")
        epochs = numbers // len(self)
        for epoch in np.unique(epochs):
            chosen = np.flatnonzero(epochs == epoch)
            pieces = self._find_pieces(int(epoch), numbers[chosen] % len(self), rows[chosen])
            _copy_pieces(self.dataset.tokens, pieces, out.tokens)
            if out.loss_mask is None:
                continue
            if self.dataset.loss_mask is None:
                out.loss_mask[rows[chosen]] = 1
            else:
                _copy_pieces(self.dataset.loss_mask, pieces, out.loss_mask)

    def _find_pieces(
        self, epoch_number: int, places: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> "_Pieces":
        """Where the samples at `places` [n] of an epoch lie in the file, each in one or several documents, and
        where they go in the flat result, of which they are the rows `rows` [n]."""
        epoch = self._order_of(epoch_number)
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
        sources = self.bounds[epoch.documents[piece]] + piece_begin - epoch.starts[piece]
        targets = rows[owner] * (self.seq_length + 1) + piece_begin - begins[owner]
        return _Pieces(sources, targets, lengths)

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        """What the data set holds, see fingerprint.py."""
        return content_of(self.dataset)

    def describe(self) -> dict[str, Any]:
        """What the run of samples follows from, besides seed and sequence length; JSON-able."""
        documents = [self.documents.start, self.documents.stop]
        one = {"prefix": str(self.dataset.prefix), "documents": documents, "content": self.content}
        return {"order": ORDER, "sets": [one]}

    def _document_bounds(self) -> NDArray[np.int64]:
        """Where documents begin in the file."""
        return self.dataset.document_bounds

    def _order_of(self, epoch: int) -> Order:
        if not self.shuffle:
            epoch = 0
        if self._held is None or self._held[0] != epoch:
            if self.cache is None or not self.shuffle:
                order = self._build_order(epoch)
            else:
                order = Order(*load_or_build(self.cache, self._describe_order(epoch), lambda: self._build_order(epoch)))
            self._held = epoch, order
        return self._held[1]

    def _describe_order(self, epoch: int) -> dict[str, Any]:
        """Everything that the order of an epoch follows from."""
        return {
            "order": ORDER,
            "content": self.content,
            "documents": [self.documents.start, self.documents.stop],
            "seq_length": self.seq_length,
            "seed": self.seed,
            "epoch": epoch,
        }

    def _build_order(self, epoch: int) -> Order:
        if self.shuffle:
            documents = permutation(len(self.documents), self.seed, epoch, DOCUMENTS)
            samples = permutation(len(self), self.seed, epoch, SAMPLES)
        else:
            documents = np.arange(len(self.documents))
            samples = np.arange(len(self))
        documents += self.documents.start
        return Order(documents, joined_starts(self.bounds, documents), samples)


def joined_starts(bounds: NDArray[np.int64], documents: NDArray[Any]) -> NDArray[np.int64]:
    """Where each of `documents` [D] begins when they are joined in this order, and where the last ends [D + 1].

    Args:
        bounds: where each document begins in the file, and where the last ends.
    """
    starts = np.zeros(len(documents) + 1, np.int64)
    np.cumsum(np.diff(bounds)[documents], out=starts[1:])
    return starts
