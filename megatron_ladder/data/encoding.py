"""The work of a preprocessing worker after reading: converts the values of a block to tokens."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.encoders import Encoder, make_encoder
from megatron_ladder.data.indexed import token_dtype
from megatron_ladder.data.reading.protocol import Parsed, Reading
from megatron_ladder.data.tokenizers import Tokenizer, TokenizerSource, load_source
from megatron_ladder.errors import UserError

_BLOCK_TOKENS = 1 << 16
"""Tokens that are joined, checked and cast at once."""


class KeyTokens(NamedTuple):
    """Tokens of some documents; documents without a token are left out."""

    token_ids: NDArray[Any]
    """[sum(lengths)] in the type of the file"""
    lengths: NDArray[np.int32]
    largest_id: int
    """-1 if there is no token."""
    loss_mask: NDArray[np.uint8] | None = None
    """[sum(lengths)] 1 for a token that counts in the loss; None if every token does."""


@dataclass(frozen=True)
class Task(ABC):
    """Converts records to tokens. It is sent to the worker processes, so it is small and immutable."""

    source: TokenizerSource
    sha256: str
    vocab_size: int
    eod_id: int
    reading: Reading
    append_eod: bool
    conversations = False
    """Whether every document is a conversation, and its tokens have a loss mask."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """Names of the output data sets: `<prefix>_<name>_document`."""

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Type of the token files: Megatron's choice for the vocabulary."""
        return token_dtype(self.vocab_size)

    def identity(self) -> dict[str, Any]:
        """Return everything except the input that determines the tokens; JSON-able."""
        values = {"tokenizer": self.sha256, **self._flags(), "--append-eod": self.append_eod}
        values["--max-document-megabytes"] = self.reading.max_bytes >> 20
        return values | ({"end-of-document token": self.eod_id} if self.append_eod else {})

    @abstractmethod
    def _flags(self) -> dict[str, Any]:
        """Return the flags of this kind of task."""

    def prepare(self, parsed: Parsed) -> Parsed:
        """Return the values to encode of a block; records that cannot be encoded become bad records."""
        return parsed

    @abstractmethod
    def encode(self, columns: Sequence[list[Any]]) -> tuple[KeyTokens, ...]:
        """Return the tokens for each output, from the columns of what was prepared."""


@dataclass(frozen=True)
class TextTask(Task):
    """Makes each text of a key a document.

    `library` encodes; it does not change the ids. `encoder` is the encoder that was compared, for the process that
    compared it; it is not sent to others.
    """

    library: str
    encoder: Encoder | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"encoder": None}

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.reading.keys

    def _flags(self) -> dict[str, Any]:
        return {"--json-keys": list(self.reading.keys)}

    def encode(self, columns: Sequence[list[Any]]) -> tuple[KeyTokens, ...]:
        encoder = self.encoder or _load_encoder(self.source, self.sha256, self.library)
        end = self.eod_id if self.append_eod else None
        return tuple(_join(encoder.encode(texts), end, self.dtype) for texts in columns)


@functools.cache
def _load_encoder(source: TokenizerSource, sha256: str, library: str) -> Encoder:
    return make_encoder(load_unchanged(source, sha256), library)


def load_unchanged(source: TokenizerSource, sha256: str) -> Tokenizer:
    """Load a tokenizer in a worker; raises UserError if it differs from the one that other processes use."""
    tokenizer = load_source(source)
    if tokenizer.sha256 != sha256:
        raise UserError(f"--tokenizer-model {source.tokenizer_model}: changed while it was used: start again")
    return tokenizer


def _join(documents: Iterable[NDArray[Any]], end: int | None, dtype: "np.dtype[Any]") -> KeyTokens:
    """Concatenate documents without empty ones, each followed by `end` if given.

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
    """Yield the joined tokens, up to _BLOCK_TOKENS at a time, always in the same array; append lengths to `lengths`.

    A document is copied as soon as the encoder yields it, and can then be freed, while its ids and the array are still
    in the processor's cache.
    """
    block, filled = np.empty(_BLOCK_TOKENS, np.uint32), 0
    for ids in documents:
        if not len(ids):
            continue
        lengths.append(len(ids) + (end is not None))
        # Afterwards the rest is shorter than the free space, so `end` fits.
        while len(ids) >= (room := _BLOCK_TOKENS - filled):
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
