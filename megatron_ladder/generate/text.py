"""Incremental text output: decode tokens as they come, and cut the text at stop strings."""

from collections.abc import Sequence

from megatron_ladder.data.tokenizers import Tokenizer

INCOMPLETE = "\ufffd"
"""Replacement character, to which tokenizers decode bytes that are not, or not yet, a whole character."""
_PROMPT_CONTEXT = 8
"""Last tokens of the prompt to decode along with a continuation: enough for a split character and a leading space."""


class IncrementalDecoder:
    """Decodes a continuation token by token; the pieces joined are its text.

    A token can be a part of a character, and some tokenizers drop the space before the first word. Each piece is
    therefore what the token adds to the text of the tokens just before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = [number for number in prompt_ids[-_PROMPT_CONTEXT:] if number < tokenizer.vocab_size]
        self._shown_ids = len(self._ids)
        self._shown = tokenizer.decode(self._ids).rstrip(INCOMPLETE)

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty within a character."""
        # A model's vocabulary may be larger than its tokenizer's; the additional tokens have no text.
        if token >= self._tokenizer.vocab_size:
            return ""
        self._ids.append(token)
        piece = self.finish()
        if piece.endswith(INCOMPLETE) or not piece:
            return ""
        self._ids = self._ids[self._shown_ids :]
        self._shown_ids = len(self._ids)
        self._shown = self._tokenizer.decode(self._ids)
        return piece

    def finish(self) -> str:
        """Return the text of trailing tokens that did not complete a character."""
        return self._tokenizer.decode(self._ids)[len(self._shown) :]


class StopFinder:
    """Cuts an incremental text before the first stop string, and holds back text that may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings."""
        self._stops, self._held = stops, ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Take the next piece and return the text to show; empty after a stop string was found."""
        if not self._stops:
            return piece
        if self.stopped:
            return ""
        text = self._held + piece
        starts = [start for start in (text.find(stop) for stop in self._stops) if start >= 0]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        longest = min(len(text), max(map(len, self._stops)) - 1)
        held = next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
        shown, self._held = text[: len(text) - held], text[len(text) - held :]
        return shown

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held
