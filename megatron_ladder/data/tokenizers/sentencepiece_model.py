"""SentencePiece models."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from megatron_ladder.data.tokenizers.protocol import read_model_file
from megatron_ladder.errors import UserError


class SentencePieceTokenizer:
    """A SentencePiece .model file.

    SentencePiece writes spaces as U+2581, so that character itself comes back as a space.
    """

    kind = "SentencePieceTokenizer"

    def __init__(self, model: Path) -> None:
        """
        Raises:
            UserError: when the file is missing, is no SentencePiece model, or has no end-of-sequence piece.
        """
        content = read_model_file("--tokenizer-model", model, "a SentencePiece .model file")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise UserError(f"--tokenizer-model {model}: not a SentencePiece model ({error})") from None
        self.files: tuple[Path, ...] = (model,)
        self.contents: tuple[bytes, ...] = (content,)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.eod_id: int = self._processor.eos_id()
        if self.eod_id < 0:
            raise UserError(f"--tokenizer-model {model}: has no end-of-sequence piece: train it with an eos_id")

    def pieces_outside_of_text(self) -> frozenset[str]:
        """Pieces that stand for no text, control tokens and single bytes, as they are spelled in the vocabulary."""
        processor = self._processor
        return frozenset(
            processor.id_to_piece(number)
            for number in range(self.vocab_size)
            if processor.is_control(number) or processor.is_byte(number) or processor.is_unknown(number)
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        text: str = self._processor.decode([int(number) for number in ids])
        return text
