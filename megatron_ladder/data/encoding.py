"""From values to tokens: what a worker does with the columns of a block, apart from how they were read."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.encoders.choose import make_encoder
from megatron_ladder.data.encoders.protocol import Encoder
from megatron_ladder.data.indexed import token_dtype
from megatron_ladder.data.reading.protocol import Parsed, Reading
from megatron_ladder.data.tokenizers import TokenizerSource, load_source
from megatron_ladder.errors import UserError

BLOCK_TOKENS = 1 << 16
"""Tokens that are joined, checked and cast at once."""


class KeyTokens(NamedTuple):
    """Tokens of some documents; documents without a token are left out."""

    token_ids: NDArray[Any]
    """[sum(lengths)] in the type of the file"""
    lengths: NDArray[np.int32]
    largest_id: int
    """-1 where there is no token."""
    loss_mask: NDArray[np.uint8] | None = None
    """[sum(lengths)] 1 where a token is learnt, 0 where it is only read; None where every token is."""


class Task(Protocol):
    """What is made of every record; it travels to the workers, so it is small and frozen."""

    @property
    def reading(self) -> Reading:
        """What is read."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the data sets that are made: `<prefix>_<name>_document`."""

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Of the token files."""

    @property
    def has_loss_mask(self) -> bool:
        """Whether tokens come with a loss mask."""

    def identity(self) -> dict[str, Any]:
        """All that decides the tokens besides the input; JSON-able."""

    @property
    def conversations(self) -> bool:
        """Whether every document is a conversation."""

    def prepare(self, parsed: Parsed) -> Parsed:
        """What is to be encoded of a block; records that cannot be are among the bad ones then."""

    def encode(self, columns: Sequence[list[Any]]) -> tuple[KeyTokens, ...]:
        """Tokens for each output, from the columns of what was prepared."""


@dataclass(frozen=True)
class TextTask:
    """Every text of a key is a document."""

    source: TokenizerSource
    sha256: str
    vocab_size: int
    eod_id: int
    library: str
    """What does the work; by its ids one cannot tell."""
    reading: Reading
    append_eod: bool
    encoder: Encoder | None = field(default=None, compare=False)
    """The one that was compared, for the process that did it; it does not travel."""
    has_loss_mask = conversations = False

    def __reduce__(self) -> tuple[Any, ...]:
        values = {name: value for name, value in vars(self).items() if name != "encoder"}
        return TextTask, tuple(values.values())

    @property
    def outputs(self) -> tuple[str, ...]:
        """The keys."""
        return self.reading.keys

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Megatron's choice for the vocabulary."""
        return token_dtype(self.vocab_size)

    def identity(self) -> dict[str, Any]:
        """Tokenizer and flags."""
        return {
            "tokenizer": self.sha256,
            "--json-keys": list(self.reading.keys),
            "--append-eod": self.append_eod,
            "--max-document-megabytes": self.reading.most_bytes >> 20,
        } | ({"end-of-document token": self.eod_id} if self.append_eod else {})

    def prepare(self, parsed: Parsed) -> Parsed:
        """As it is."""
        return parsed

    def encode(self, columns: Sequence[list[Any]]) -> tuple[KeyTokens, ...]:
        """Tokenises each column."""
        encoder = self.encoder or encoder_of(self.source, self.sha256, self.library)
        end = self.eod_id if self.append_eod else None
        return tuple(join(encoder.encode(texts), end, self.dtype) for texts in columns)


@functools.cache
def encoder_of(source: TokenizerSource, sha256: str, library: str) -> Encoder:
    """Loaded once a process. The checksum makes sure that all processes use the same tokenizer."""
    tokenizer = load_source(source)
    if tokenizer.sha256 != sha256:
        raise UserError(f"--tokenizer-model {source.tokenizer_model}: changed while it was used: start again")
    return make_encoder(tokenizer, library)


def join(documents: Iterable[NDArray[Any]], end: int | None, dtype: "np.dtype[Any]") -> KeyTokens:
    """Documents one after the other, empty ones left out, each followed by `end` if there is one.

    Raises:
        ValueError: an id does not fit the type.
    """
    lengths, parts, largest = list[int](), list[NDArray[Any]](), -1
    for block in _blocks(documents, end, lengths):
        largest = max(largest, int(block.max()))
        if largest > np.iinfo(dtype).max:
            raise ValueError(f"token id {largest} does not fit {dtype}")
        parts.append(block.astype(dtype))
    token_ids = np.concatenate(parts) if parts else np.empty(0, dtype)
    return KeyTokens(token_ids, np.array(lengths, np.int32), largest)


def _blocks(documents: Iterable[NDArray[Any]], end: int | None, lengths: list[int]) -> Iterator[NDArray[np.uint32]]:
    """The joined tokens, up to BLOCK_TOKENS at a time, always in the same array; lengths of documents to `lengths`.

    A document is copied as soon as an encoder gives it, and can be freed: its ids, and the array, are in the
    processor's cache still.
    """
    block, filled = np.empty(BLOCK_TOKENS, np.uint32), 0
    for ids in documents:
        if not len(ids):
            continue
        lengths.append(len(ids) + (end is not None))
        # What is left is shorter than the room, so that the end has a place.
        while len(ids) >= (room := BLOCK_TOKENS - filled):
            block[filled:] = ids[:room]
            yield block
            ids, filled = ids[room:], 0
        block[filled : filled + len(ids)] = ids
        filled += len(ids)
        if end is not None:
            block[filled] = end
            filled += 1
    if filled:
        yield block[:filled]
