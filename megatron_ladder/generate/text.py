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


class StopFinder:
    """Cuts a text that comes piece by piece before the first of some strings.

    What might be the beginning of such a string is held back until it is known.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Takes the next piece, and returns what can be shown; nothing once a string was found."""
        if not self._stops:
            return piece
        if self.stopped:
            return ""
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        most = min(len(text), max(map(len, self._stops)) - 1)
        held = next(
            (n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and is no such string after all."""
        held, self._held = self._held, ""
        return held
