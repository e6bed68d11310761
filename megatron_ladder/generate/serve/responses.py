"""JSON of responses: complete ones and chunks of streams."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.generate.requests import NewToken
from megatron_ladder.generate.serve.protocol import ApiRequest
from megatron_ladder.generate.text import INCOMPLETE

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", None: None}
"""The engine's finish reasons -> OpenAI's."""


@dataclass
class CompletionChoice:
    """The sample of one choice of a response, as far as it has been generated."""

    tokens: list[NewToken] = field(default_factory=list)
    begun: bool = False
    """Whether its first token has arrived, possibly not yet in `tokens`."""
    ended: bool = False
    """Whether its last event has arrived."""

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def finished(self) -> bool:
        return bool(self.tokens) and self.tokens[-1].finish_reason is not None


class ResponseWriter:
    """Builds the JSON of one response."""

    def __init__(self, request: ApiRequest, model_name: str, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._kind = "chat.completion" if request.chat else "text_completion"
        self._id = f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"created": int(time.time()), "model": model_name}

    def complete(self, choices: Sequence[CompletionChoice]) -> dict[str, Any]:
        """Return the response when all samples are finished."""
        written = []
        for index, choice in enumerate(choices):
            content: dict[str, Any] = {"text": choice.text}
            if self._request.chat:
                content = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            written.append(self._choice(index, content, choice.tokens))
        return self._object(self._kind, written) | {"usage": self._usage(choices)}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Return the chunk before a sample's first token; only chats have one."""
        if not self._request.chat:
            return None
        return self._chunk([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, ())])

    def chunk(self, index: int, token: NewToken) -> dict[str, Any] | None:
        """Return the chunk of a sample's next token; None if the token adds nothing to the response."""
        if not (token.text or token.finish_reason or self._request.logprobs is not None):
            return None
        content: dict[str, Any] = {"text": token.text}
        if self._request.chat:
            content = {"delta": {"content": token.text} if token.text else {}}
        return self._chunk([self._choice(index, content, [token])])

    def last_chunk(self, choices: Sequence[CompletionChoice]) -> dict[str, Any] | None:
        """Return the chunk with token counts, if the request includes usage."""
        if not self._request.include_usage:
            return None
        return self._chunk([]) | {"usage": self._usage(choices)}

    def _usage(self, choices: Sequence[CompletionChoice]) -> dict[str, int]:
        prompt, generated = self._request.prompt_tokens, sum(len(choice.tokens) for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._object(f"{self._kind}.chunk" if self._request.chat else self._kind, choices)
        return chunk | {"usage": None} if self._request.include_usage else chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, **self._head, "choices": choices}

    def _choice(self, index: int, content: dict[str, Any], tokens: Sequence[NewToken]) -> dict[str, Any]:
        reason = _FINISH_REASONS[tokens[-1].finish_reason] if tokens else None
        logprobs = self._logprobs(tokens) if self._request.logprobs is not None and tokens else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[NewToken]) -> dict[str, Any]:
        texts = [self._text(token.id) for token in tokens]
        values = [token.logprob for token in tokens]
        alternatives = [
            [(self._text(other), logprob) for other, logprob in token.alternatives or ()] for token in tokens
        ]
        if not self._request.chat:
            by_text = [_by_text(others) for others in alternatives] if self._request.logprobs else None
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": by_text, "text_offset": None}
        content = [
            _chat_token(text, value) | {"top_logprobs": [_chat_token(*other) for other in others]}
            for text, value, others in zip(texts, values, alternatives, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _text(self, token: int) -> str:
        # A model's vocabulary may be larger than its tokenizer's; the additional tokens have no text.
        return self._tokenizer.decode([token]) if token < self._tokenizer.vocab_size else ""


def _by_text(alternatives: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return log-probabilities by text, in descending order; of tokens with equal text, the most likely counts."""
    by_text: dict[str, float] = {}
    for text, logprob in alternatives:
        by_text.setdefault(text, logprob)
    return by_text


def _chat_token(text: str, logprob: float | None) -> dict[str, Any]:
    content = None if INCOMPLETE in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": content}
