"""Tokenizers whose results are obvious."""

from collections.abc import Sequence
from pathlib import Path

from megatron_ladder.data.tokenizers import Tokenizer


class Bytes(Tokenizer):
    """Ids are bytes; several ids can form one character."""

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

    def token_bytes(self, number: int) -> bytes:
        return bytes([number])


class Words(Bytes):
    """Every id except 0 is a word; words are joined with spaces."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" w{number}" for number in ids if number).removeprefix(" ")

    def token_bytes(self, number: int) -> bytes:
        return self.decode([number]).encode()


class Gated(Words):
    """Encodes a text "wait..." only after a named pipe has been opened and closed by a writer."""

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    def encode(self, text: str) -> list[int]:
        if text.startswith("wait"):
            self._gate.read_bytes()
        return list(text.encode())
