"""Tokenizers without a vocabulary file, for tests and for data that is tokens already."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from megatron_ladder.errors import UserError


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 ends a document."""

    kind = "ByteTokenizer"
    files: tuple[Path, ...] = ()
    contents: tuple[bytes, ...] = ()
    sha256 = hashlib.sha256(b"ByteTokenizer").hexdigest()
    vocab_size = 257
    eod_id = 256

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of bytes."""
        return bytes(int(number) for number in ids if number < self.eod_id).decode(errors="replace")


class NullTokenizer:
    """A text is ids in decimal, separated by spaces; the id after the last ends a document (as Megatron's)."""

    kind = "NullTokenizer"
    files: tuple[Path, ...] = ()
    contents: tuple[bytes, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        """
        Args:
            vocab_size: ids that texts have; the end of a document is one more.
        """
        if vocab_size < 1:
            raise UserError(f"--vocab-size {vocab_size}: expected 1 or more")
        self.sha256 = hashlib.sha256(f"NullTokenizer {vocab_size}".encode()).hexdigest()
        self.vocab_size = vocab_size + 1
        self.eod_id = vocab_size

    def encode(self, text: str) -> list[int]:
        """The numbers of a text.

        Raises:
            UserError: for a word that is no number of the vocabulary.
        """
        ids = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.eod_id:
                raise UserError(f"--tokenizer-type NullTokenizer: {word!r} found, expected 0 to {self.eod_id - 1}")
            ids.append(int(word))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers as text."""
        return " ".join(str(int(number)) for number in ids if number != self.eod_id)
