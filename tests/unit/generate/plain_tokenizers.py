"""Tokenizers so plain that one sees what they should give."""

from collections.abc import Sequence
from pathlib import Path


class Bytes:
    """Ids are bytes; the plainest tokenizer that cuts characters."""

    kind = "bytes"
    files: tuple[Path, ...] = ()
    contents: tuple[bytes, ...] = ()
    sha256 = ""
    vocab_size = 256
    eod_id = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Words(Bytes):
    """Every id but 0 is a word with a blank before it, which is dropped at the beginning of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" w{number}" for number in ids if number).removeprefix(" ")
