"""The order of samples, a stable format. It depends only on the data, the sequence length and the seed, never on the
length of the run, on batch sizes or on the number of ranks.

In epoch e the documents are permuted by the random stream (seed, e, DOCUMENTS) and concatenated. The tokens are cut
into samples of seq_length + 1, each of which begins with the last token of the previous one, so that every token except
the first is a label once. The remainder at the end is dropped. The samples are permuted by the stream (seed, e,
SAMPLES). Every epoch has the same number of samples, so sample n of a run is sample n % len of epoch n // len.
"""

import functools
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.indexed import IndexedDataset, sampled_checksum
from megatron_ladder.errors import Problem, UserError, counted

DOCUMENTS, SAMPLES = 0, 1
"""Purposes of an epoch's random streams."""


def permutation(size: int, seed: int, epoch: int, purpose: int) -> NDArray[np.int64]:
    """Return the stable argsort of `size` raw 64-bit draws of PCG64(SeedSequence([seed, epoch, purpose])).

    NumPy guarantees raw draws across versions, but not `shuffle`.
    """
    if seed < 0:
        raise UserError(Problem({"seed": seed}, "{}: expected 0 or more"))
    stream = np.random.PCG64(np.random.SeedSequence([seed, epoch, purpose]))
    return np.argsort(stream.random_raw(size), kind="stable")


class SampleRows(NamedTuple):
    """Samples of seq_length + 1 tokens: the inputs, and the labels one position later."""

    tokens: NDArray[Any]
    """[n, seq_length + 1], integers"""
    loss_mask: NDArray[np.uint8] | None
    """[n, seq_length + 1]: 1 for a token that counts as a label; None if all do"""
    begins: NDArray[np.bool_] | None = None
    """[n, seq_length + 1]: whether a document begins; None: documents begin after end-of-document tokens"""
    lengths: NDArray[np.int64] | None = None
    """[n]: number of tokens before the padding of each row, at most seq_length + 1; None: no row has padding"""


class Samples(ABC):
    """An infinite sequence of samples with random access.

    `name` is for messages, `token_dtype` fits all tokens, and `has_begins` is set if documents' beginnings and the
    lengths of rows are given.
    """

    name: str
    seq_length: int
    token_dtype: "np.dtype[Any]"
    has_loss_mask: bool
    has_begins = False

    @abstractmethod
    def fill(self, numbers: NDArray[np.int64], rows: NDArray[np.int64], out: SampleRows) -> None:
        """Write samples by their numbers [n] >= 0 into the rows `rows` [n] of contiguous arrays of any integer type."""

    def samples(self, numbers: NDArray[np.int64]) -> SampleRows:
        """Return samples by their numbers [n] >= 0. Consecutive numbers of one epoch avoid rebuilding its order."""
        shape = (len(numbers), self.seq_length + 1)
        mask = np.empty(shape, np.uint8) if self.has_loss_mask else None
        begins = np.empty(shape, np.bool_) if self.has_begins else None
        lengths = np.empty(len(numbers), np.int64) if self.has_begins else None
        rows = SampleRows(np.empty(shape, self.token_dtype), mask, begins, lengths)
        self.fill(numbers, np.arange(len(numbers)), rows)
        return rows


class DatasetSamples(Samples):
    """Samples of `tokens` tokens of a range of documents; without `shuffle`, documents and samples keep their order.

    `order` is its name in checkpoints.
    """

    order: str
    tokens: int

    def __init__(self, dataset: IndexedDataset, documents: range, seq_length: int, seed: int, shuffle: bool) -> None:
        self.dataset = dataset
        self.documents = documents
        self.seq_length = seq_length
        self.seed = seed
        self.shuffle = shuffle
        self.name = str(dataset.prefix)
        self.token_dtype = dataset.tokens.dtype
        self._orders: dict[int, Any] = {}

    def _permutation(self, size: int, epoch: int, purpose: int) -> NDArray[np.int64]:
        return permutation(size, self.seed, epoch, purpose) if self.shuffle else np.arange(size)

    def _order_of(self, epoch: int) -> Any:
        if epoch not in self._orders:
            self._orders = {epoch: self._make_order(epoch)}
        return self._orders[epoch]

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples of an epoch."""

    @abstractmethod
    def _make_order(self, epoch: int) -> Any:
        """Return the order of an epoch, which is kept until another one is read."""

    @abstractmethod
    def _fill_epoch(self, epoch: int, places: NDArray[np.int64], rows: NDArray[np.int64], out: SampleRows) -> None:
        """Write the samples at `places` [n] of an epoch into the rows `rows` [n] of `out`."""

    def fill(self, numbers: NDArray[np.int64], rows: NDArray[np.int64], out: SampleRows) -> None:
        self.dataset.check_size()
        epochs, places = np.divmod(numbers, len(self))
        for epoch in np.unique(epochs).tolist():
            chosen = np.flatnonzero(epochs == epoch)
            self._fill_epoch(epoch if self.shuffle else 0, places[chosen], rows[chosen], out)

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        """A short JSON-able description of the content of the data set, independent of its location.

        It includes blocks from all over the token file, because the sidecar may be missing or belong to another file.
        """
        dataset = self.dataset
        return {
            "documents": len(dataset),
            "tokens": len(dataset.tokens),
            "dtype": dataset.tokens.dtype.name,
            "idx_checksum": dataset.idx_checksum,
            "bin_checksum": None if dataset.sidecar is None else dataset.sidecar.bin_checksum,
            "bin_sample": sampled_checksum(dataset.tokens),
            "loss_mask_sample": None if dataset.loss_mask is None else sampled_checksum(dataset.loss_mask),
        }

    def describe(self) -> dict[str, Any]:
        """Return everything that determines the samples, except the seed and the sequence length; JSON-able."""
        documents = [self.documents.start, self.documents.stop]
        identity = {"prefix": self.name, "documents": documents, "content": self.content}
        return {"order": self.order, "sets": [identity]}


class SampleSource(DatasetSamples):
    """Samples of concatenated documents; keeps the order of an epoch: 16 bytes per document and 8 per sample."""

    order = "ladder-1"

    def __init__(
        self, dataset: IndexedDataset, documents: range, seq_length: int, seed: int, shuffle: bool, part: str = "train"
    ) -> None:
        """Raises UserError for fewer than seq_length + 1 tokens, or none that counts; `part` is for messages."""
        super().__init__(dataset, documents, seq_length, seed, shuffle)
        self.has_loss_mask = dataset.loss_mask is not None
        first, last = dataset.document_bounds[documents.start], dataset.document_bounds[documents.stop]
        self.tokens = int(last - first)
        if self.tokens < seq_length + 1:
            has = f"the {part} part ({counted(len(documents), 'document')}) has {self.tokens} tokens"
            reason = "{prefix}: {has}, {needed} are needed for one sample"
            fix = "give more text, a shorter {seq_length}, or another {split}"
            raise UserError(Problem({}, reason, fix, prefix=dataset.prefix, has=has, needed=seq_length + 1))
        if dataset.loss_mask is not None and not dataset.loss_mask[first + 1 : last].view(np.bool_).any():
            reason = "{prefix}: no token of the {part} part counts by its loss mask, so there is nothing to learn"
            raise UserError(Problem({}, reason, "give other data, or {loss_on} all", prefix=dataset.prefix, part=part))

    def __len__(self) -> int:
        return (self.tokens - 1) // self.seq_length

    def _fill_epoch(self, epoch: int, places: NDArray[np.int64], rows: NDArray[np.int64], out: SampleRows) -> None:
        documents, starts, samples = self._order_of(epoch)
        begins = samples[places] * self.seq_length
        ends = begins + self.seq_length + 1
        # Documents first .. last (inclusive) of each sample; "right" skips empty documents.
        first = np.searchsorted(starts, begins, side="right") - 1
        last = np.searchsorted(starts, ends, side="left") - 1
        counts = last - first + 1
        # One entry per piece, which is the part of a document that is in a sample.
        owner = np.repeat(np.arange(len(places)), counts)
        piece = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + first[owner]
        piece_begin = np.maximum(starts[piece], begins[owner])
        lengths = np.minimum(starts[piece + 1], ends[owner]) - piece_begin
        sources = self.dataset.document_bounds[documents[piece]] + piece_begin - starts[piece]
        targets = rows[owner] * (self.seq_length + 1) + piece_begin - begins[owner]
        arrays = [(self.dataset.tokens, out.tokens)]
        if out.loss_mask is not None and self.dataset.loss_mask is not None:
            arrays.append((self.dataset.loss_mask, out.loss_mask))
        elif out.loss_mask is not None:
            out.loss_mask[rows] = 1
        ranges = [bounds.tolist() for bounds in (sources, sources + lengths, targets, targets + lengths)]
        for data, whole in arrays:
            flat = whole.reshape(-1)
            # Slices take a quarter of the time of a gather with an index per token.
            for begin, end, to, to_end in zip(*ranges, strict=True):
                flat[to:to_end] = data[begin:end]

    def _make_order(self, epoch: int) -> tuple[NDArray[np.int64], ...]:
        """Return the documents [D] to concatenate, where each begins there and the end [D + 1], and the samples [S]."""
        documents = self._permutation(len(self.documents), epoch, DOCUMENTS) + self.documents.start
        starts = np.zeros(len(documents) + 1, np.int64)
        np.cumsum(np.diff(self.dataset.document_bounds)[documents], out=starts[1:])
        return documents, starts, self._permutation(len(self), epoch, SAMPLES)
