"""The order of samples, a stable format. It depends only on the data, the sequence length and the seed, never on the
length of the run, on batch sizes or on the number of ranks.

In epoch e the documents are permuted by the random stream (seed, e, DOCUMENTS) and concatenated. The tokens are cut
into samples of seq_length + 1, each of which begins with the last token of the previous one, so that every token except
the first is a label once. The remainder at the end is dropped. The samples are permuted by the stream (seed, e,
SAMPLES). Every epoch has the same number of samples, so sample n of a run is sample n % len of epoch n // len.
"""

import functools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.order_cache import load_or_build
from megatron_ladder.data.sidecar import content_of
from megatron_ladder.errors import UserError

_ORDER = "ladder-1"
"""Name of this order in checkpoints and in the cache."""

DOCUMENTS, SAMPLES = 0, 1
"""Purposes of an epoch's random streams."""


def permutation(size: int, seed: int, epoch: int, purpose: int) -> NDArray[np.int64]:
    """Return the stable argsort of `size` raw 64-bit draws of PCG64(SeedSequence([seed, epoch, purpose])).

    It is defined by raw draws because NumPy guarantees bit streams across versions, but not `shuffle`. The draws are
    sorted with their lowest bits replaced by the position, which is twice as fast as an argsort. Afterwards only draws
    with equal higher bits have to be ordered.

    Raises:
        UserError: the seed is negative.
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
    """`969,30,1` -> shares of train, valid and test that add up to 1; missing shares are 0.

    Raises:
        UserError: the text is not one to three non-negative numbers with a positive sum.
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
    """Split documents 0 .. documents - 1 in order, rounded as in Megatron.

    Each share is rounded separately; the sum of the rounding errors is subtracted from all three ends.
    """
    ends = np.cumsum([0, *(round(share * documents) for share in shares)])
    ends[1:] -= ends[-1] - documents
    # If the first share is empty, Megatron's correction can be negative.
    first, second, third, fourth = (int(end) for end in ends.clip(0))
    return range(first, second), range(second, third), range(third, fourth)


class SampleRows(NamedTuple):
    """Samples of seq_length + 1 tokens: the inputs, and the labels one position later."""

    tokens: NDArray[Any]
    """[n, seq_length + 1], integers"""
    loss_mask: NDArray[np.uint8] | None
    """[n, seq_length + 1]: 1 for a token that counts as a label; None if all do"""
    begins: NDArray[np.bool_] | None = None
    """[n, seq_length + 1]: whether a document begins; None: documents begin after end-of-document tokens"""


class Samples(ABC):
    """An infinite sequence of samples with random access."""

    seq_length: int
    has_begins = False
    """Whether the samples mark where documents begin."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the data, for messages."""

    @property
    @abstractmethod
    def token_dtype(self) -> "np.dtype[Any]":
        """A type that fits all tokens."""

    @property
    @abstractmethod
    def has_loss_mask(self) -> bool:
        """Whether the samples have a loss mask."""

    @abstractmethod
    def fill(self, numbers: NDArray[np.int64], rows: NDArray[np.int64], out: SampleRows) -> None:
        """Write samples by their numbers [n] >= 0 into the rows `rows` [n] of `out`."""

    def samples(self, numbers: NDArray[np.int64], out: SampleRows | None = None) -> SampleRows:
        """Return samples by their numbers [n] >= 0. Consecutive numbers of one epoch avoid rebuilding its order.

        Args:
            out: arrays to fill and return. Tokens may have any integer type that is large enough; the loss mask must be
                None exactly if the data has none. New arrays of the data's type if not given.
        """
        if len(numbers) and int(numbers.min()) < 0:
            raise IndexError(f"sample {numbers.min()} of {self.name}")
        shape = (len(numbers), self.seq_length + 1)
        if out is None:
            mask = np.empty(shape, np.uint8) if self.has_loss_mask else None
            begins = np.empty(shape, np.bool_) if self.has_begins else None
            out = SampleRows(np.empty(shape, self.token_dtype), mask, begins)
        if (out.loss_mask is not None) != self.has_loss_mask:
            raise ValueError(f"{self.name}: expected a loss mask exactly if the data has one")
        for array in out:
            if array is not None and (array.shape != shape or not array.flags.c_contiguous):
                raise ValueError(f"{self.name}: expected a contiguous array {shape} to fill, found {array.shape}")
        self.fill(numbers, np.arange(len(numbers)), out)
        return out


class DatasetSamples(Samples):
    """Samples of a range of documents of one data set."""

    order: str
    """Name of the order in checkpoints."""
    tokens: int
    """Number of tokens of the documents."""

    def __init__(self, dataset: IndexedDataset, documents: range, seq_length: int, seed: int, shuffle: bool) -> None:
        self.dataset, self.documents, self.seq_length = dataset, documents, seq_length
        self.seed, self.shuffle = seed, shuffle

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples of an epoch."""

    @property
    def name(self) -> str:
        """The data set's prefix."""
        return str(self.dataset.prefix)

    @property
    def sources(self) -> "tuple[DatasetSamples, ...]":
        """These samples, as a blend of one."""
        return (self,)

    @property
    def token_dtype(self) -> "np.dtype[Any]":
        """Type of the tokens."""
        return self.dataset.tokens.dtype

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        """See `content_of`."""
        return content_of(self.dataset)

    def describe(self) -> dict[str, Any]:
        """Return everything that determines the samples, except the seed and the sequence length; JSON-able."""
        documents = [self.documents.start, self.documents.stop]
        one = {"prefix": str(self.dataset.prefix), "documents": documents, "content": self.content}
        return {"order": self.order, "sets": [one]}


class Order(NamedTuple):
    """The order of one epoch with D documents and S samples."""

    documents: NDArray[np.int64]
    """[D] documents in the order of concatenation."""
    starts: NDArray[np.int64]
    """[D + 1] first token of each document in the concatenated tokens, and their number."""
    samples: NDArray[np.int64]
    """[S] cuts in the order in which they are read."""


class _Pieces(NamedTuple):
    """Ranges of tokens to copy; each array is [pieces]."""

    sources: NDArray[np.int64]
    """First token of each piece in the file."""
    targets: NDArray[np.int64]
    """First position of each piece in the flat result."""
    lengths: NDArray[np.int64]


def _copy_pieces(data: NDArray[Any], pieces: _Pieces, out: NDArray[Any]) -> None:
    """Copy slice by slice, which takes a quarter of the time of a gather with an index per token."""
    flat = out.reshape(-1)
    source_ends, target_ends = pieces.sources + pieces.lengths, pieces.targets + pieces.lengths
    for begin, end, to, to_end in zip(
        pieces.sources.tolist(), source_ends.tolist(), pieces.targets.tolist(), target_ends.tolist(), strict=True
    ):
        flat[to:to_end] = data[begin:end]


class SampleSource(DatasetSamples):
    """Samples cut from the concatenated documents, as described at the top of this file.

    Keeps the order of one epoch in memory: 16 bytes per document and 8 per sample.
    """

    order = _ORDER

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
            documents: the documents of this source.
            shuffle: permute documents and samples; otherwise they keep their order.
            part: train, valid or test, for messages.
            cache: directory for shuffled orders, see order_cache.py; None: each process builds its own.

        Raises:
            UserError: the documents have fewer than seq_length + 1 tokens.
        """
        super().__init__(dataset, documents, seq_length, seed, shuffle)
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
        """Number of samples of an epoch."""
        return (self.tokens - 1) // self.seq_length

    @property
    def has_loss_mask(self) -> bool:
        """Whether the data set has a loss mask."""
        return self.dataset.loss_mask is not None

    def fill(self, numbers: NDArray[np.int64], rows: NDArray[np.int64], out: SampleRows) -> None:
        """See Samples."""
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
        """Return the pieces of the samples at `places` [n] of an epoch, which become the rows `rows` [n]."""
        epoch = self._order_of(epoch_number)
        begins = epoch.samples[places] * self.seq_length
        ends = begins + self.seq_length + 1
        # Documents first .. last (inclusive) of each sample; "right" skips empty documents.
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

    def _document_bounds(self) -> NDArray[np.int64]:
        """Return the first token of each document in the file, and the number of tokens."""
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
        """Return everything that determines the order of an epoch."""
        return {
            "order": self.order,
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
    """Return where each of `documents` [D] begins if they are concatenated in this order, and their length [D + 1].

    Args:
        bounds: first token of each document in the file, and the number of tokens.
    """
    starts = np.zeros(len(documents) + 1, np.int64)
    np.cumsum(np.diff(bounds)[documents], out=starts[1:])
    return starts
