"""Tokenizers whose results are obvious."""

from collections.abc import Sequence

from megatron_ladder.data.tokenizers import Tokenizer


class Bytes(Tokenizer):
    """Ids are bytes; several ids can form one character."""

    kind = "bytes"
    sha256 = ""
    vocab_size = 256
    eod_id = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Words(Bytes):
    """Every id except 0 is a word; words are joined with spaces."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" w{number}" for number in ids if number).removeprefix(" ")
