"""Requests of OpenAI's API: from the JSON of a body to what the engine is asked, and what is wrong with it.

A parameter that this server does not know, or knows and does not support, is refused by name unless it says what
happens anyway; none is passed over.
"""

import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

import msgspec

from megatron_ladder.data.chat_template import ChatTemplate, Message, NotRendered
from megatron_ladder.generate.options import (
    LARGEST_PENALTY,
    LARGEST_REPETITION_PENALTY,
    MOST_ALTERNATIVES,
    SMALLEST_REPETITION_PENALTY,
)
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters, request_seed

B = TypeVar("B", bound="CommonBody")

COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say, as in OpenAI's API; a chat goes on as long as it may."""
MOST_STOPS, LONGEST_STOP = 16, 256
LABELS = frozenset({"user", "safety_identifier", "metadata"})
"""Parameters that have no part in the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},), "echo": (False,), "suffix": ("",),
    "best_of": (1,), "tools": ([],), "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "store": (False,), "service_tier": ("auto", "default"),
}  # fmt: skip
"""Parameters that are not supported, and the values of them that change nothing."""

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)]
RepetitionPenalty = Annotated[
    float, msgspec.Meta(ge=SMALLEST_REPETITION_PENALTY, le=LARGEST_REPETITION_PENALTY)
]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class ApiError(Exception):
    """What a request is answered with when it cannot be carried out."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """
        Args:
            status: of HTTP.
            param: the parameter that is wrong.
            code: a word that programs look at.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class StreamOptions:
    include_usage: bool = False


@dataclass(frozen=True, kw_only=True)
class CommonBody:
    model: str
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    n: PositiveInt = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | tuple[str, ...] = ()
    seed: Seed | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class CompletionBody(CommonBody):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_ALTERNATIVES)] | None = None


@dataclass(frozen=True, kw_only=True)
class ChatBody(CommonBody):
    messages: list[dict[str, Any]]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_ALTERNATIVES)] = 0


@dataclass(frozen=True)
class Rules:
    """What decides how a request is read."""

    model_name: str
    """What `model` must be."""
    encode: Callable[[str], tuple[int, ...]]
    """The ids of a text, those before it included; none for an empty text."""
    encode_chat: Callable[[str], tuple[int, ...]]
    """The ids of a rendered conversation."""
    template: ChatTemplate | None
    """Of conversations."""
    vocab_size: int
    """Of the model."""
    positions: int
    """Tokens of prompt and continuation together at most."""
    most_samples: int
    """Samples of one request at most."""
    eos_ids: frozenset[int]
    """Tokens that end a text."""


@dataclass(frozen=True)
class Question:
    """A request that can be carried out."""

    samples: tuple[GenerationRequest, ...]
    """In the order of the answer's choices: all of the first prompt, then all of the second."""
    chat: bool
    """Whether it is a conversation."""
    stream: bool
    """Whether the answer comes piece by piece,"""
    include_usage: bool
    """and ends with the numbers of tokens."""
    logprobs: int | None
    """None if the answer has no log-probabilities; else of how many likeliest tokens beside the chosen one."""
    prompt_tokens: int
    """Of all prompts, each counted once."""


def read_completion(body: bytes, rules: Rules) -> Question:
    """Reads the body of /v1/completions; raises ApiError."""
    asked = _read(body, CompletionBody, rules)
    prompts = _prompts(asked.prompt, rules)
    limit = asked.max_tokens or COMPLETION_TOKENS
    return _question(asked, prompts, [limit] * len(prompts), asked.logprobs, "prompt", rules)


def read_chat(body: bytes, rules: Rules) -> Question:
    """Reads the body of /v1/chat/completions; raises ApiError."""
    asked = _read(body, ChatBody, rules)
    if rules.template is None:
        raise ApiError(400, "the model's tokenizer has no chat template: use /v1/completions")
    try:
        prompt = rules.encode_chat(rules.template.prompt([_message(message) for message in asked.messages]))
    except NotRendered as error:
        raise ApiError(400, f"the chat template does not take these messages: {error}", "messages") from None
    limits = {asked.max_tokens, asked.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    limit = next(iter(limits), None) or max(1, rules.positions - len(prompt))
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs are a part of logprobs: give logprobs: true as well", "top_logprobs")
    logprobs = asked.top_logprobs if asked.logprobs else None
    return _question(asked, [prompt], [limit], logprobs, "messages", rules)


def _read(body: bytes, kind: type[B], rules: Rules) -> B:
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}") from None
    values = {name: value for name, value in given.items() if value is not None and name not in LABELS}
    known = {entry.name for entry in fields(kind)}
    for name in values.keys() - known:
        if name not in NEUTRAL:
            raise ApiError(400, f"unknown parameter: {name}", name, "unknown_parameter")
        if values.pop(name) not in NEUTRAL[name]:
            raise ApiError(400, f"{name} is not supported: leave it out", name, "unsupported_parameter")
    try:
        asked = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        found = re.search(r"`\$\.(\w+)|required field `(\w+)`", str(error))
        raise ApiError(400, str(error), next(filter(None, found.groups()), None) if found else None) from None
    if asked.model != rules.model_name:
        raise ApiError(
            404, f"the model {asked.model!r} does not exist: this server has {rules.model_name!r}", "model",
            "model_not_found",
        )  # fmt: skip
    if not math.isfinite(asked.temperature):
        raise ApiError(400, "temperature must be finite", "temperature")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options belong to a stream: give stream as well", "stream_options")
    return asked


def _prompts(given: str | Sequence[str | int | Sequence[int]], rules: Rules) -> list[tuple[int, ...]]:
    """Ids of each prompt; a list may hold texts, ids, or lists of ids."""
    if isinstance(given, str):
        return [rules.encode(given)]
    if all(isinstance(part, str) for part in given):
        return [rules.encode(str(part)) for part in given]
    ids = [part for part in given if isinstance(part, int)]
    if len(ids) == len(given):
        return [tuple(ids)]
    if all(isinstance(part, list) for part in given):
        return [tuple(part) for part in given if isinstance(part, list)]
    raise ApiError(400, "a list of prompts holds texts, or ids, or lists of ids, and no mixture", "prompt")


def _message(given: Mapping[str, Any]) -> Message:
    """A message with its content as one text."""
    # Clients send an answer's message back as they got it, with "refusal": null.
    given = {name: value for name, value in given.items() if value is not None}
    unknown = given.keys() - {"role", "content", "name"}
    if unknown:
        raise ApiError(400, f"{sorted(unknown)[0]} of a message is not supported", "messages")
    role, content = given.get("role"), given.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise ApiError(400, f"the role {role!r} is not supported", "messages")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
                   and isinstance(part["text"], str) for part in content):  # fmt: skip
            raise ApiError(400, "the content of a message must be text", "messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(given.get("name", ""), str):
        raise ApiError(400, "the content of a message must be text", "messages")
    # Few templates know OpenAI's newer word, and many write nothing for a role that they do not know.
    return {**given, "role": "system" if role == "developer" else role, "content": content}


def _question(
    asked: CommonBody, prompts: Sequence[tuple[int, ...]], limits: Sequence[int], logprobs: int | None, param: str,
    rules: Rules,
) -> Question:  # fmt: skip
    count = len(prompts) * asked.n
    if not 1 <= count <= rules.most_samples:
        raise ApiError(400, f"{count} samples in one request: from 1 to {rules.most_samples} are allowed", "n")
    for ids, limit in zip(prompts, limits, strict=True):
        _check_prompt(ids, limit, param, rules)
    stop = (asked.stop,) if isinstance(asked.stop, str) else asked.stop
    if len(stop) > MOST_STOPS or not all(0 < len(text) <= LONGEST_STOP for text in stop):
        raise ApiError(400, f"stop: up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters are allowed", "stop")
    eos_ids = frozenset[int]() if asked.ignore_eos else rules.eos_ids
    samples = [
        GenerationRequest(ids, limit, _sampling(asked, _seed(asked, ids, index), logprobs, rules), eos_ids, stop)
        for ids, limit in zip(prompts, limits, strict=True)
        for index in range(asked.n)
    ]
    options = asked.stream_options or StreamOptions()
    prompt_tokens = sum(map(len, prompts))
    chat = isinstance(asked, ChatBody)
    return Question(tuple(samples), chat, asked.stream, options.include_usage, logprobs, prompt_tokens)


def _check_prompt(ids: Sequence[int], limit: int, param: str, rules: Rules) -> None:
    if not ids:
        raise ApiError(400, "an empty prompt cannot be continued: give at least one token", param)
    outside = [number for number in ids if not 0 <= number < rules.vocab_size]
    if outside:
        raise ApiError(400, f"the id {outside[0]} is not one of the model's {rules.vocab_size}", param)
    if len(ids) + limit > rules.positions:
        raise ApiError(
            400, f"the prompt has {len(ids)} tokens and max_tokens is {limit}: together {rules.positions} are allowed",
            param, "context_length_exceeded",
        )  # fmt: skip


def _seed(asked: CommonBody, ids: Sequence[int], index: int) -> int:
    """Without a seed anew for each sample, also where prompts are equal."""
    return secrets.randbits(64) if asked.seed is None else request_seed(asked.seed, ids, index)


def _sampling(asked: CommonBody, seed: int, logprobs: int | None, rules: Rules) -> SamplingParameters:
    return SamplingParameters(
        temperature=asked.temperature,
        # More are all, and a plan holds 64 bits.
        top_k=min(asked.top_k, rules.vocab_size),
        top_p=asked.top_p,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        seed=seed,
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
    )
