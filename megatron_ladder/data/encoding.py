"""From values to tokens: what a worker does with the columns of a block, apart from how they were read."""

import functools
from collections.abc import Sequence
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


def join(documents: Sequence[NDArray[Any]], end: int | None, dtype: "np.dtype[Any]") -> KeyTokens:
    """Documents one after the other, empty ones left out, each followed by `end` if there is one.

    Raises:
        ValueError: an id does not fit the type.
    """
    documents = [ids for ids in documents if len(ids)]
    if not documents:
        return KeyTokens(np.empty(0, dtype), np.empty(0, np.int32), -1)
    lengths = np.fromiter(map(len, documents), np.int32, len(documents))
    if end is not None:
        closing = np.array([end], np.uint32)
        documents = [part for ids in documents for part in (ids, closing)]
        lengths += 1
    token_ids = np.concatenate(documents)
    largest = int(token_ids.max())
    if largest > np.iinfo(dtype).max:
        raise ValueError(f"token id {largest} does not fit {dtype}")
    return KeyTokens(token_ids.astype(dtype), lengths, largest)
