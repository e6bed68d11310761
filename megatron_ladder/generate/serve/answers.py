"""The JSON of answers: whole ones, and the pieces of a stream."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.generate.requests import NewToken
from megatron_ladder.generate.serve.questions import Question
from megatron_ladder.generate.text import INCOMPLETE

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", None: None}
"""The engine's words -> OpenAI's."""


@dataclass
class Choice:
    """A sample as it comes."""

    tokens: list[NewToken] = field(default_factory=list)
    begun: bool = False
    """Whether its first token has come; `tokens` may still wait for it,"""
    ended: bool = False
    """and whether its last event has."""

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def finished(self) -> bool:
        return bool(self.tokens) and self.tokens[-1].finish_reason is not None


class AnswerWriter:
    """Makes the JSON of one answer."""

    def __init__(self, question: Question, model_name: str, tokenizer: Tokenizer) -> None:
        self._question, self._tokenizer = question, tokenizer
        kind = "chat.completion" if question.chat else "text_completion"
        self._id = f"{'chatcmpl' if question.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"created": int(time.time()), "model": model_name}
        self._kind = kind

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer when all samples are finished."""
        written = []
        for index, choice in enumerate(choices):
            said: dict[str, Any] = {"text": choice.text}
            if self._question.chat:
                said = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            written.append(self._choice(index, said, choice.tokens))
        return self._object(self._kind, written) | {"usage": self.usage(choices)}

    def beginning(self, index: int) -> dict[str, Any] | None:
        """The piece of a stream before a sample's first token, if there is one."""
        if not self._question.chat:
            return None
        return self._piece([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, ())])

    def piece(self, index: int, token: NewToken) -> dict[str, Any] | None:
        """The piece of a stream with a sample's next token; None where it adds nothing that can be read."""
        if not (token.text or token.finish_reason or self._question.logprobs is not None):
            return None
        said: dict[str, Any] = {"text": token.text}
        if self._question.chat:
            said = {"delta": {"content": token.text} if token.text else {}}
        return self._piece([self._choice(index, said, [token])])

    def last_piece(self, choices: Sequence[Choice]) -> dict[str, Any] | None:
        """The piece of a stream with the numbers of tokens, if they were asked for."""
        if not self._question.include_usage:
            return None
        return self._piece([]) | {"usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Numbers of tokens; one that ends a text counts as well."""
        asked, generated = self._question.prompt_tokens, sum(len(choice.tokens) for choice in choices)
        return {"prompt_tokens": asked, "completion_tokens": generated, "total_tokens": asked + generated}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        piece = self._object(f"{self._kind}.chunk" if self._question.chat else self._kind, choices)
        return piece | {"usage": None} if self._question.include_usage else piece

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, **self._head, "choices": choices}

    def _choice(self, index: int, said: dict[str, Any], tokens: Sequence[NewToken]) -> dict[str, Any]:
        reason = FINISH_REASONS[tokens[-1].finish_reason] if tokens else None
        logprobs = self._logprobs(tokens) if self._question.logprobs is not None and tokens else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[NewToken]) -> dict[str, Any]:
        texts = [self._text(token.id) for token in tokens]
        values = [token.logprob for token in tokens]
        likeliest = [
            [(self._text(other), logprob) for other, logprob in token.alternatives or ()] for token in tokens
        ]
        if not self._question.chat:
            named = [_by_text(others) for others in likeliest] if self._question.logprobs else None
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": named, "text_offset": None}
        content = [
            _chat_token(text, value) | {"top_logprobs": [_chat_token(*other) for other in others]}
            for text, value, others in zip(texts, values, likeliest, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _text(self, token: int) -> str:
        # A model's vocabulary may be larger than its tokenizer's; such a token has no text.
        return self._tokenizer.decode([token]) if token < self._tokenizer.vocab_size else ""


def _by_text(alternatives: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Descending; of several tokens that read alike, the likeliest."""
    named: dict[str, float] = {}
    for text, logprob in alternatives:
        named.setdefault(text, logprob)
    return named


def _chat_token(text: str, logprob: float | None) -> dict[str, Any]:
    whole = None if INCOMPLETE in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": whole}
