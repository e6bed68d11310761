"""OpenAI's API: build the JSON of responses and of streamed chunks."""

import time
import uuid
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.generate.requests import NewToken
from megatron_ladder.generate.scoring import Alternatives
from megatron_ladder.generate.serve.protocol import ApiRequest
from megatron_ladder.generate.text import TextOffsets, token_name, token_text


class ResponseWriter:
    """Builds the JSON of one response; `choices` are the tokens of each choice."""

    def __init__(self, request: ApiRequest, model_name: str, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._kind = "chat.completion" if request.chat else "text_completion"
        self._chunk_kind = "chat.completion.chunk" if request.chat else "text_completion"
        self._id = f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"created": int(time.time()), "model": model_name}
        self._text_of = cache(partial(token_text, tokenizer))
        self._offsets = [
            TextOffsets(tokenizer, () if request.echoed else sample.prompt_ids) for sample in request.samples
        ]

    def complete(self, choices: Sequence[Sequence[NewToken]]) -> dict[str, Any]:
        """Return the response when all samples are finished."""
        written = []
        for index, tokens in enumerate(choices):
            text = self._text(index, tokens, is_first=True)
            content: dict[str, Any] = {"text": text}
            if self._request.chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            written.append(self._choice(index, content, tokens))
        return self._object(self._kind, written) | {"usage": self._usage(choices)}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Return the chunk before a sample's first token; None if the response has none."""
        if self._request.echoed is not None:
            return self._chunk(self._choice(index, {"text": self._request.echoed[index]}, ()))
        if not self._request.chat:
            return None
        return self._chunk(self._choice(index, {"delta": {"role": "assistant", "content": ""}}, ()))

    def chunk(self, index: int, token: NewToken) -> dict[str, Any] | None:
        """Return the chunk of a sample's next token; None if the token adds nothing to the response."""
        if not (token.text or token.finish_reason or self._request.logprobs is not None):
            return None
        text = self._text(index, [token])
        content: dict[str, Any] = {"text": text}
        if self._request.chat:
            content = {"delta": {"content": text} if text else {}}
        return self._chunk(self._choice(index, content, [token]))

    def last_chunk(self, choices: Sequence[Sequence[NewToken]]) -> dict[str, Any] | None:
        """Return the chunk with token counts, if the request includes usage."""
        return self._chunk() | {"usage": self._usage(choices)} if self._request.include_usage else None

    def _text(self, index: int, tokens: Sequence[NewToken], is_first: bool = False) -> str:
        echoed = self._request.echoed[index] if self._request.echoed is not None and is_first else ""
        return echoed + "".join(token.text for token in tokens if self._request.continues)

    def _usage(self, choices: Sequence[Sequence[NewToken]]) -> dict[str, int]:
        prompt, generated = self._request.prompt_tokens, sum(map(len, choices)) if self._request.continues else 0
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = self._object(self._chunk_kind, choices)
        return chunk | {"usage": None} if self._request.include_usage else chunk

    def _object(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, **self._head, "choices": choices}

    def _choice(self, index: int, content: dict[str, Any], tokens: Sequence[NewToken]) -> dict[str, Any]:
        reason = tokens[-1].finish_reason if tokens else None
        logprobs = self._logprobs(index, tokens) if self._request.logprobs is not None and tokens else None
        reason_name = "stop" if reason == "eos" else reason
        if reason is not None and not self._request.continues:
            reason_name = "length"
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason_name}

    def _logprobs(self, index: int, tokens: Sequence[NewToken]) -> dict[str, Any]:
        ids: list[int] = []
        values: list[float | None] = []
        alternatives: list[Alternatives | None] = []
        if scores := tokens[0].prompt_scores:
            # The first token of a prompt has no score, because there is no token before it.
            ids += self._request.samples[index].prompt_ids
            values += [None, *scores.logprobs]
            alternatives += [None, *scores.alternatives]
        if self._request.continues:
            ids += [token.id for token in tokens]
            values += [token.logprob for token in tokens]
            alternatives += [token.alternatives or () for token in tokens]
        texts = [self._text_of(number) for number in ids]
        if self._request.chat:
            content = [
                self._chat_token(number, value) | {"top_logprobs": [self._chat_token(*other) for other in others or ()]}
                for number, value, others in zip(ids, values, alternatives, strict=True)
            ]
            return {"content": content, "refusal": None}
        top_logprobs = None
        if self._request.logprobs:
            top_logprobs = [
                others if others is None else self._by_text((*others, (number, value)))
                for number, value, others in zip(ids, values, alternatives, strict=True)
            ]
        offsets = [self._offsets[index].push(number) for number in ids]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top_logprobs, "text_offset": offsets}

    def _by_text(self, scored: Iterable[tuple[int, float | None]]) -> dict[str, float | None]:
        """Return log-probabilities by text; a second token of equal text is named by its id."""
        named: dict[str, tuple[int, float | None]] = {}
        for number, logprob in scored:
            if named.setdefault(self._text_of(number), (number, logprob))[0] != number:
                named[token_name(number)] = number, logprob
        return {text: logprob for text, (_, logprob) in named.items()}

    def _chat_token(self, number: int, logprob: float | None) -> dict[str, Any]:
        content = self._tokenizer.token_bytes(number) if number < self._tokenizer.vocab_size else b""
        return {"token": self._text_of(number), "logprob": logprob, "bytes": list(content)}
