"""From samples to what one data-parallel rank computes in one optimizer step.

Of the ranks that share a model one reads, and broadcasts to the others. It reads one step ahead, in a thread.

Layouts: rows [n, s + 1] are samples of s = seq_length tokens and the one that follows, all of an optimizer step of one
data-parallel rank; a micro-batch is [b, s], b = micro_batch_size.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.data.samples import SampleRows, Samples
from megatron_ladder.errors import UserError

COUNTS, BEGINS = 1 << 40, 1 << 41
"""Bits above a token id on its way between ranks: it counts as a label; it begins a document."""
HAS_MASK, HAS_BEGINS, IS_MISTAKE = 1, 2, 4
"""Bits of the word before the tokens: what the rows have, or that there are none because of a mistake."""


class MicroBatch(NamedTuple):
    """What one forward pass reads; tensors on the CPU."""

    tokens: Tensor
    """[b, s] int64"""
    labels: Tensor
    """[b, s] int64: the token after each one"""
    loss_mask: Tensor | None = None
    """[b, s] float32, or None where every label counts"""
    positions: Tensor | None = None
    """[b, s] int64: rotary position of each token, or None for 0 to s - 1 in every row"""
    document_bounds: Tensor | None = None
    """[documents + 1] int32: where among the b * s tokens, row after row, documents begin, and b * s. A token sees its
    own document alone, and no document goes beyond a row. None: every token sees all before it in its row."""


@dataclass(frozen=True)
class BatchShape:
    """How many samples of which length."""

    seq_length: int
    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Raises UserError when the sizes do not multiply."""
        if self.global_batch_size % (self.micro_batch_size * self.data_parallel_size):
            raise UserError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of --micro-batch-size "
                f"{self.micro_batch_size} x data-parallel size {self.data_parallel_size}"
            )

    @property
    def rows(self) -> int:
        """Samples of a data-parallel rank in a step."""
        return self.global_batch_size // self.data_parallel_size


@dataclass(frozen=True)
class DocumentRules:
    """What the end of a document means within a sample; as in Megatron's `_get_ltor_masks_and_position_ids`."""

    eod_id: int | None = None
    """The end-of-document token; it belongs to the document that it ends. None only where nothing else is set."""
    reset_position_ids: bool = False
    """Rotary positions begin anew with each document."""
    reset_attention_mask: bool = False
    """A token sees only its own document."""
    eod_mask_loss: bool = False
    """What follows an end-of-document token does not count."""

    @property
    def cuts_rows(self) -> bool:
        """Whether every stage of a pipeline must know where documents begin."""
        return self.reset_position_ids or self.reset_attention_mask


class RowReader(Protocol):
    """Reads one data-parallel rank's samples, a step's at a time."""

    def read(self) -> SampleRows:
        """The next rows [n, s + 1].

        Raises:
            UserError: the data is not what the run expects.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a reader must be given to read on from here; JSON-able."""
        ...


class SampleReader:
    """Reads samples by their numbers.

    Sample k of a global batch belongs to accumulation step a, rank r and row i where
    k = (a * data_parallel_size + r) * micro_batch_size + i, as in Megatron: the layout decides who reads a sample,
    never which samples a global batch holds.
    """

    def __init__(
        self, source: Samples, shape: BatchShape, data_parallel_rank: int, consumed_samples: int, vocab_size: int
    ) -> None:
        """
        Args:
            consumed_samples: samples that all ranks together have read before; 0 for a new run.
            vocab_size: ids of the model's vocabulary, without padding.
        """
        if shape.seq_length != source.seq_length:
            raise ValueError(f"the source cuts samples of {source.seq_length} tokens, not of {shape.seq_length}")
        self.source = source
        self.vocab_size = vocab_size
        self._step = shape.global_batch_size
        samples = np.arange(self._step).reshape(-1, shape.data_parallel_size, shape.micro_batch_size)
        self._next = consumed_samples + samples[:, data_parallel_rank].reshape(-1)

    def read(self) -> SampleRows:
        """Raises UserError when the data holds a token id that the vocabulary lacks."""
        rows = self.source.samples(self._next)
        smallest, largest = int(rows.tokens.min()), int(rows.tokens.max())
        if smallest < 0 or largest >= self.vocab_size:
            raise UserError(
                f"{self.source.name}: holds token id {smallest if smallest < 0 else largest}, the "
                f"vocabulary has ids 0 to {self.vocab_size - 1}: give the --tokenizer-model with which "
                "the data was preprocessed"
            )
        self._next = self._next + self._step
        return rows

    def state(self) -> dict[str, Any]:
        """Nothing: the number of consumed samples says all."""
        return {}


class GlobalBatchLoader(Iterator[list[MicroBatch]]):
    """Endless; each item is one optimizer step's micro-batches of this rank.

    Attributes:
        consumed_samples: samples that all data-parallel ranks together have been given.
        reader_state: the reader's state after what was given, on the rank that reads.
    """

    def __init__(
        self,
        reader: RowReader | None,
        shape: BatchShape,
        rules: DocumentRules,
        consumed_samples: int = 0,
        group: CommGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            reader: on rank 0 of the group, None on the others.
            group: ranks that need the same batches; this one alone if not given.
            device: where tensors lie that the group exchanges; the CPU if not given.
        """
        self.shape = shape
        self.rules = rules
        self.consumed_samples = consumed_samples
        self.reader_state = {} if reader is None else reader.state()
        self._group = group or CommGroup.alone()
        self._device = device or torch.device("cpu")
        self._reader = reader
        self._thread = None if reader is None else ThreadPoolExecutor(1, "reader")
        self._ahead: Future[tuple[SampleRows, dict[str, Any]]] | None = None

    def __next__(self) -> list[MicroBatch]:
        """
        Raises:
            UserError: on every rank of the group, what the reader raised.
        """
        rows = self._rows()
        self.consumed_samples += self.shape.global_batch_size
        return make_micro_batches(rows, self.rules, self.shape.micro_batch_size)

    def close(self) -> None:
        """Returns when nothing is being read any more."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _rows(self) -> SampleRows:
        if self._group.size == 1:
            return self._read()
        packed = torch.empty(self.shape.rows * (self.shape.seq_length + 1) + 1, dtype=torch.int64)
        mistakes: tuple[str, ...] = ()
        if self._thread is not None:
            try:
                packed = torch.from_numpy(pack_rows(self._read()))
            except UserError as error:
                mistakes = error.mistakes
                packed[0] = IS_MISTAKE
        packed = self._group.broadcast(packed.to(self._device)).cpu()
        if int(packed[0]) == IS_MISTAKE:
            raise UserError(*self._group.broadcast_object(mistakes))
        return unpack_rows(packed.numpy(), self.shape.rows)

    def _read(self) -> SampleRows:
        assert self._thread is not None
        ahead = self._ahead or self._thread.submit(self._read_one)
        rows, self.reader_state = ahead.result()
        self._ahead = self._thread.submit(self._read_one)
        return rows

    def _read_one(self) -> tuple[SampleRows, dict[str, Any]]:
        assert self._reader is not None
        return self._reader.read(), self._reader.state()


class UnreadBatches(Iterator[list[MicroBatch]]):
    """What a pipeline's stage in the middle is given, which computes with nothing of a batch: empty tensors."""

    def __init__(self, shape: BatchShape, consumed_samples: int = 0) -> None:
        self.shape = shape
        self.consumed_samples = consumed_samples
        self.reader_state: dict[str, Any] = {}

    def __next__(self) -> list[MicroBatch]:
        self.consumed_samples += self.shape.global_batch_size
        nothing = torch.empty(0, dtype=torch.int64)
        return [MicroBatch(nothing, nothing)] * (self.shape.rows // self.shape.micro_batch_size)

    def close(self) -> None:
        """Nothing is being read."""


def make_micro_batches(rows: SampleRows, rules: DocumentRules, micro_batch_size: int) -> list[MicroBatch]:
    """Cuts the rows of a step into its micro-batches, in their order."""
    both = torch.from_numpy(rows.tokens.astype(np.int64))
    tokens, labels = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    mask = None if rows.loss_mask is None else torch.from_numpy((rows.loss_mask[:, 1:] != 0).astype(np.float32))
    if rules.eod_mask_loss:
        after_none = torch.from_numpy((rows.tokens[:, :-1] != rules.eod_id).astype(np.float32))
        mask = after_none if mask is None else mask * after_none
    begins = _document_begins(rows, rules.eod_id) if rules.cuts_rows else np.empty(0, bool)
    positions = torch.from_numpy(_positions(begins)) if rules.reset_position_ids else None
    batches = []
    for first in range(0, len(tokens), micro_batch_size):
        chosen = slice(first, first + micro_batch_size)
        bounds = _bounds(begins[chosen]) if rules.reset_attention_mask else None
        of_mask, of_positions = (None if whole is None else whole[chosen] for whole in (mask, positions))
        batches.append(MicroBatch(tokens[chosen], labels[chosen], of_mask, of_positions, bounds))
    return batches


def _document_begins(rows: SampleRows, eod_id: int | None) -> NDArray[np.bool_]:
    """[n, s]: where a document begins; each row begins one."""
    if rows.begins is not None:
        begins = rows.begins[:, :-1].copy()
    else:
        begins = np.zeros((len(rows.tokens), rows.tokens.shape[1] - 1), bool)
        begins[:, 1:] = rows.tokens[:, :-2] == eod_id
    begins[:, 0] = True
    return begins


def _positions(begins: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[n, s] where documents begin -> [n, s] how far each token is from where its own began."""
    columns = np.broadcast_to(np.arange(begins.shape[1]), begins.shape)
    positions: NDArray[np.int64] = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return positions


def _bounds(begins: NDArray[np.bool_]) -> Tensor:
    """[b, s] where documents begin -> as MicroBatch.document_bounds."""
    return torch.from_numpy(np.append(np.flatnonzero(begins), begins.size).astype(np.int32))


def pack_rows(rows: SampleRows) -> NDArray[np.int64]:
    """Rows as one array [1 + n * (s + 1)], for one broadcast."""
    packed = np.zeros(1 + rows.tokens.size, np.int64)
    packed[1:] = rows.tokens.reshape(-1)
    for array, bit, flag in ((rows.loss_mask, COUNTS, HAS_MASK), (rows.begins, BEGINS, HAS_BEGINS)):
        if array is not None:
            packed[0] |= flag
            packed[1:] |= (array.reshape(-1) != 0) * np.int64(bit)
    return packed


def unpack_rows(packed: NDArray[np.int64], count: int) -> SampleRows:
    """The `count` rows of `pack_rows`."""
    flags, words = int(packed[0]), packed[1:].reshape(count, -1)
    mask = ((words & COUNTS) != 0).astype(np.uint8) if flags & HAS_MASK else None
    begins = (words & BEGINS) != 0 if flags & HAS_BEGINS else None
    return SampleRows(words & (COUNTS - 1), mask, begins)
