"""Text of tokens as they come."""

from collections.abc import Sequence

from megatron_ladder.data.tokenizers import Tokenizer

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes bytes to that are no whole character, or not yet."""
PROMPT_CONTEXT = 8
"""Tokens of the prompt that a continuation is decoded behind: enough for a character and the blank before it."""


class TextStream:
    """Decodes a continuation piece by piece; the pieces joined are its text.

    A token alone may be a part of a character, and some tokenizers drop the blank before a first word, so each
    piece is what a token adds to the text of those just before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = [number for number in prompt_ids[-PROMPT_CONTEXT:] if number < tokenizer.vocab_size]
        self._shown_ids = len(self._ids)
        self._shown = self._decode().rstrip(INCOMPLETE)

    def push(self, token: int) -> str:
        """The text that this token completes; often one word, or "" within a character."""
        # A model's vocabulary may be larger than its tokenizer's; such a token has no text.
        if token >= self._tokenizer.vocab_size:
            return ""
        self._ids.append(token)
        text = self._decode()
        if text.endswith(INCOMPLETE):
            return ""
        piece = text[len(self._shown) :]
        if not piece:
            return ""
        self._ids = self._ids[self._shown_ids :]
        self._shown_ids = len(self._ids)
        self._shown = self._decode()
        return piece

    def finish(self) -> str:
        """What was held back in the hope of a whole character."""
        return self._decode()[len(self._shown) :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids)
