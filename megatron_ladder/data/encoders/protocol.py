"""What tokenises many texts, and the encoder that every tokenizer has: itself."""

import array
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.tokenizers import Tokenizer


class Encoder(Protocol):
    """Texts to arrays of ids."""

    library: str
    """What does the work."""

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[Any]]:
        """Ids [tokens of the text] of each text, unsigned whole numbers of 32 bits at most, as they are asked for."""


class NotExpressible(Exception):
    """The library cannot do this tokenizer's work; the message says why, for a sentence after a colon."""


class ReferenceEncoder:
    """The library that defines the ids."""

    def __init__(self, tokenizer: Tokenizer, library: str) -> None:
        self.library = library
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[Any]]:
        """Ids of each text."""
        # Twice as fast as np.array, which asks every number for its type.
        arrays = (array.array("I", ids) for ids in self._tokenizer.encode_batch(texts))
        return (np.frombuffer(ids, np.uintc) if ids else np.empty(0, np.uintc) for ids in arrays)
