"""From samples to the micro-batches of one data-parallel rank in one optimizer step.

One of the ranks that share a model replica reads, one step ahead in a thread, and broadcasts to the others. They may
receive the rows of a step (`receive_ahead`) while the device computes the step before it.

Layouts: rows [n, s + 1] are samples of s = seq_length tokens and the next token, all samples of one data-parallel rank
in one optimizer step; a micro-batch is [b, s] with b = micro_batch_size.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.data.samples import SampleRows, Samples
from megatron_ladder.errors import Problem, UserError


class MicroBatch(NamedTuple):
    """The input of one forward pass, on the CPU: tokens [b, s] int64 and labels, the token after each token."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor | None = None
    """[b, s] float32; None if every label counts"""
    positions: Tensor | None = None
    """[b, s] int64: rotary position of each token; None for 0 to s - 1 in every row"""
    lengths: Tensor | None = None
    """[b] int64: number of tokens before the padding of each row; None if no row has padding"""
    document_bounds: Tensor | None = None
    """[documents + 1] int32: first token of each document among the b * s tokens, row by row, and b * s. A token
    attends only to its own document, which ends with its row. None: a token attends to all previous ones of its row."""


@dataclass(frozen=True)
class BatchShape:
    """Numbers of samples; the other two divide the global batch size."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int = 1


@dataclass(frozen=True)
class DocumentRules:
    """The effect of document ends within a sample, as in Megatron's `_get_ltor_masks_and_position_ids`."""

    eod_id: int | None = None
    """The end-of-document token, which belongs to the document that it ends. None only if no other field is set."""
    reset_position_ids: bool = False
    """Rotary positions restart at 0 with each document."""
    reset_attention_mask: bool = False
    """A token attends only to its own document."""
    eod_mask_loss: bool = False
    """The label after an end-of-document token does not count."""

    @property
    def cuts_rows(self) -> bool:
        """Whether every pipeline stage needs the document bounds."""
        return self.reset_position_ids or self.reset_attention_mask


class RowReader(Protocol):
    """Reads the samples of one data-parallel rank, step by step."""

    def read(self) -> SampleRows:
        """Return the next rows [n, s + 1]; raises UserError for unexpected data."""

    def state(self) -> dict[str, Any]:
        """Return the state from which another reader continues; JSON-able."""


class SampleReader:
    """Reads samples by their numbers.

    Sample k of a global batch belongs to accumulation step a, rank r and row i with
    k = (a * data_parallel_size + r) * micro_batch_size + i, as in Megatron. So the layout determines which rank reads a
    sample, but not which samples a global batch contains.
    """

    def __init__(
        self, source: Samples, shape: BatchShape, data_parallel_rank: int, consumed_samples: int, vocab_size: int
    ) -> None:
        """`consumed_samples` were read by all ranks together; `vocab_size` is the model's, without padding."""
        self.source = source
        self.vocab_size = vocab_size
        self._step = shape.global_batch_size
        samples = np.arange(self._step).reshape(-1, shape.data_parallel_size, shape.micro_batch_size)
        self._next = consumed_samples + samples[:, data_parallel_rank].reshape(-1)

    def read(self) -> SampleRows:
        """Return the next rows; raises UserError for a token id that is not in the vocabulary."""
        rows = self.source.samples(self._next)
        smallest, largest = int(rows.tokens.min()), int(rows.tokens.max())
        if smallest < 0 or largest >= self.vocab_size:
            reason = "{name}: holds token id {number}, the vocabulary has ids 0 to {last}"
            fix = "give the {tokenizer_model} with which the data was preprocessed"
            number = smallest if smallest < 0 else largest
            raise UserError(Problem({}, reason, fix, name=self.source.name, number=number, last=self.vocab_size - 1))
        self._next += self._step
        return rows

    def state(self) -> dict[str, Any]:
        """Return nothing: the number of consumed samples determines the position."""
        return {}


@dataclass(eq=False)
class GlobalBatchLoader(Iterator[list[MicroBatch]]):
    """An infinite iterator; each item is the list of this rank's micro-batches in one optimizer step.

    `consumed_samples` counts what all data-parallel ranks together have received; `reader_state` is the reader's state
    after these samples, on the rank that reads.
    """

    reader: RowReader | None
    """None except on rank 0 of `group`."""
    shape: BatchShape
    rules: DocumentRules
    consumed_samples: int = 0
    group: CommGroup = field(default_factory=CommGroup.alone)
    """The ranks that exchange the batches, in host memory."""

    def __post_init__(self) -> None:
        self.reader_state = {} if self.reader is None else self.reader.state()
        self._thread = ThreadPoolExecutor(1, "reader")
        self._ahead: Future[tuple[SampleRows, dict[str, Any]]] | None = None
        self._received: tuple[SampleRows | UserError, dict[str, Any]] | None = None

    def __next__(self) -> list[MicroBatch]:
        """Raises the reader's UserError on every rank of the group."""
        self.receive_ahead()
        assert self._received is not None
        (rows, state), self._received = self._received, None
        if isinstance(rows, UserError):
            raise rows
        self.reader_state = state
        self.consumed_samples += self.shape.global_batch_size
        return make_micro_batches(rows, self.rules, self.shape.micro_batch_size)

    def receive_ahead(self) -> None:
        """Receive the rows of the next step, if they are not here yet; all ranks of the group must call it."""
        if self._received is not None:
            return
        rows: Any = None
        state = self.reader_state
        if self.reader is not None:
            try:
                ahead = self._ahead or self._thread.submit(self._read_one)
                rows, state = ahead.result()
                self._ahead = self._thread.submit(self._read_one)
            except UserError as error:
                rows = error
        self._received = self.group.broadcast_object(rows), state

    def close(self) -> None:
        """Stop reading ahead, and wait until the reader is idle."""
        self._thread.shutdown(cancel_futures=True)

    def _read_one(self) -> tuple[SampleRows, dict[str, Any]]:
        assert self.reader is not None
        return self.reader.read(), self.reader.state()


def make_micro_batches(rows: SampleRows, rules: DocumentRules, micro_batch_size: int) -> list[MicroBatch]:
    """Divide rows into micro-batches, the last of which may be smaller."""
    both = torch.from_numpy(rows.tokens.astype(np.int64))
    tokens, labels = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    mask = None if rows.loss_mask is None else torch.from_numpy((rows.loss_mask[:, 1:] != 0).astype(np.float32))
    if rules.eod_mask_loss:
        after_none = torch.from_numpy((rows.tokens[:, :-1] != rules.eod_id).astype(np.float32))
        mask = after_none if mask is None else mask * after_none
    positions = None
    begins = np.zeros(tokens.shape, bool)
    if rules.cuts_rows:
        # Whether a document begins at each token [n, s]; each row begins one.
        begins[:, 1:] = rows.tokens[:, :-2] == rules.eod_id if rows.begins is None else rows.begins[:, 1:-1]
        begins[:, 0] = True
    if rules.reset_position_ids:
        columns = np.broadcast_to(np.arange(begins.shape[1]), begins.shape)
        positions = torch.from_numpy(columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1))
    lengths = None if rows.lengths is None else torch.from_numpy(rows.lengths.clip(max=tokens.shape[1]))
    batches = []
    for first in range(0, len(tokens), micro_batch_size):
        chosen = slice(first, first + micro_batch_size)
        bounds = None
        if rules.reset_attention_mask:
            ends = np.append(np.flatnonzero(begins[chosen]), begins[chosen].size)
            bounds = torch.from_numpy(ends.astype(np.int32))
        of_mask, of_positions, of_lengths = (
            None if whole is None else whole[chosen] for whole in (mask, positions, lengths)
        )
        batches.append(MicroBatch(tokens[chosen], labels[chosen], of_mask, of_positions, of_lengths, bounds))
    return batches
