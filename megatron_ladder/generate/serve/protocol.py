"""OpenAI's API: parse and validate JSON bodies of requests.

No parameter is ignored silently. An unknown or unsupported parameter is rejected by name, unless its value requests
what happens anyway.
"""

import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from megatron_ladder.data.chat_template import Message
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.generate.options import (
    LARGEST_PENALTY,
    LARGEST_REPETITION_PENALTY,
    MAX_ALTERNATIVES,
    SMALLEST_REPETITION_PENALTY,
)
from megatron_ladder.generate.prompts import long_prompt
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters, request_seed
from megatron_ladder.generate.structured import json_grammar

B = TypeVar("B", bound="_CommonRequest")

_COMPLETION_TOKENS = 16
"""Default max_tokens of a completion, as in OpenAI's API. The default of a chat is the rest of the model's context."""
_MAX_STOPS, _MAX_STOP_LENGTH = 16, 256
_IGNORED = frozenset({"user", "safety_identifier", "metadata"})
"""Parameters that do not affect the response."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""Unsupported parameters, with their values that have no effect."""
_INSTEAD = {name: "remove it, or serve an exported directory with vLLM" for name in ("tools", "tool_choice")}

_PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)]
_RepetitionPenalty = Annotated[float, msgspec.Meta(ge=SMALLEST_REPETITION_PENALTY, le=LARGEST_REPETITION_PENALTY)]
_Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class ApiError(Exception):
    """The error response to a request."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """`status` is that of HTTP, `param` names the invalid parameter, and `code` is a machine-readable reason."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class _JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


@dataclass(frozen=True, kw_only=True)
class _CommonRequest:
    model: str
    max_tokens: _PositiveInt | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    n: _PositiveInt = 1
    stream: bool = False
    stream_options: _StreamOptions | None = None
    stop: str | tuple[str, ...] = ()
    seed: _Seed | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: _RepetitionPenalty = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    ignore_eos: bool = False
    response_format: _ResponseFormat | None = None


@dataclass(frozen=True, kw_only=True)
class _CompletionRequest(_CommonRequest):
    prompt: str | Annotated[list[str | int | list[int]], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None
    echo: bool = False


@dataclass(frozen=True, kw_only=True)
class _ChatRequest(_CommonRequest):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: _PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_ALTERNATIVES)] = 0


@dataclass(frozen=True)
class ServedModel:
    """The model as requests see it."""

    name: str
    """Required value of `model`."""
    tokenizer: Tokenizer
    has_template: bool
    """Whether the tokenizer has a chat template."""
    vocab_size: int
    positions: int
    """Largest sum of the tokens of prompt and continuation."""
    most_characters: int
    """Largest number of characters that so many tokens can have."""
    max_samples: int
    """Largest number of samples of one request."""
    eos_ids: frozenset[int]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids; the model's vocabulary may be larger than its tokenizer's."""
        return self.tokenizer.decode([number for number in ids if number < self.tokenizer.vocab_size])


@dataclass(frozen=True)
class ApiRequest:
    """A valid request."""

    samples: tuple[GenerationRequest, ...]
    """In the order of the response's choices: all samples of the first prompt, then all of the second."""
    chat: bool
    stream: bool
    include_usage: bool
    """Whether a stream ends with token counts."""
    logprobs: int | None
    """Number of most likely tokens to return with the log-probability of each token; None for no log-probabilities."""
    prompt_tokens: int
    """Sum over all prompts."""
    echoed: tuple[str, ...] | None = None
    """The prompt of each sample, if responses repeat it."""
    continues: bool = True
    """False if the response omits the token that the engine generates."""


@dataclass(frozen=True)
class ParsedRequest:
    """A valid body, before its prompts are encoded."""

    prompts: list[Any]
    """Texts, or lists of ids, or the messages of one conversation."""
    param: str
    """The parameter that contains them."""
    count: int
    """Number of samples."""
    complete: Callable[[Sequence[Sequence[int]]], ApiRequest]
    """Returns the request, given the ids of each prompt; raises ApiError."""
    has_schema: bool
    """Whether `complete` compiles a schema, which can take seconds."""


def parse_completion(body: bytes, model: ServedModel) -> ParsedRequest:
    """Parse the body of /v1/completions; raises ApiError."""
    request = _parse(body, _CompletionRequest, model)
    given: list[Any] = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    kinds = {type(part) for part in given}
    if kinds == {int}:
        given = [given]
    elif len(kinds) != 1:
        raise ApiError(400, "a list of prompts must contain only texts, only ids, or only lists of ids", "prompt")
    limit = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if limit == 0 and not request.echo:
        raise ApiError(400, "max_tokens: 0 requires echo: true", "max_tokens")

    def complete(prompts: Sequence[Sequence[int]]) -> ApiRequest:
        valid = _validate(request, prompts, limit, request.logprobs, "prompt", model)
        if not request.echo:
            return valid
        texts = given if kinds == {str} else [model.text(ids) for ids in prompts]
        samples = tuple(replace(sample, score_prompt=request.logprobs is not None) for sample in valid.samples)
        echoed = tuple(text for text in texts for _ in range(request.n))
        return replace(valid, samples=samples, echoed=echoed, continues=limit > 0)

    return ParsedRequest(given, "prompt", _sample_count(request, given, model), complete, _has_schema(request))


def parse_chat(body: bytes, model: ServedModel) -> ParsedRequest:
    """Parse the body of /v1/chat/completions; raises ApiError."""
    request = _parse(body, _ChatRequest, model)
    if not model.has_template:
        raise ApiError(400, "the model's tokenizer has no chat template; use /v1/completions")
    if len(request.messages) > model.positions:
        message = f"{len(request.messages)} messages; the context has {model.positions} tokens"
        raise ApiError(400, message, "messages", "context_length_exceeded")
    messages = [_message(message) for message in request.messages]
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; use one of them", "max_completion_tokens")
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")

    def complete(prompts: Sequence[Sequence[int]]) -> ApiRequest:
        limit = next(iter(limits), None) or max(1, model.positions - len(prompts[0]))
        logprobs = request.top_logprobs if request.logprobs else None
        return _validate(request, prompts, limit, logprobs, "messages", model)

    return ParsedRequest(messages, "messages", _sample_count(request, [""], model), complete, _has_schema(request))


def _sample_count(request: _CommonRequest, prompts: Sequence[str | list[int]], model: ServedModel) -> int:
    """Return the number of samples; raises ApiError if there are too many, or a prompt is certainly too long."""
    count = len(prompts) * request.n
    if count > model.max_samples:
        raise ApiError(400, f"{count} samples in one request; 1 to {model.max_samples} are allowed", "n")
    longest = max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0)
    if longest > model.most_characters:
        raise ApiError(400, long_prompt(longest, model.most_characters), "prompt", "context_length_exceeded")
    return count


def _parse(body: bytes, kind: type[B], model: ServedModel) -> B:
    try:
        raw = msgspec.json.decode(body, type=dict[str, Any])
        json.loads(body, object_pairs_hook=_reject_repeated_keys)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}") from None
    values = {name: value for name, value in raw.items() if value is not None and name not in _IGNORED}
    for name in values.keys() - {entry.name for entry in fields(kind)}:
        if name not in _NEUTRAL:
            raise ApiError(400, f"unknown parameter: {name}", name, "unknown_parameter")
        if values.pop(name) not in _NEUTRAL[name]:
            fix = _INSTEAD.get(name, "remove it")
            raise ApiError(400, f"{name} is not supported; {fix}", name, "unsupported_parameter")
    try:
        request = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        found = re.search(r"`\$\.(\w+)|required field `(\w+)`", str(error))
        raise ApiError(400, str(error), next(filter(None, found.groups()), None) if found else None) from None
    if request.model != model.name:
        message = f"the model {request.model!r} does not exist; this server has {model.name!r}"
        raise ApiError(404, message, "model", "model_not_found")
    if not math.isfinite(request.temperature):
        raise ApiError(400, "temperature must be finite", "temperature")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options requires stream: true", "stream_options")
    return request


def _reject_repeated_keys(pairs: list[tuple[str, Any]]) -> None:
    """Readers disagree about which of the values counts."""
    if len(dict(pairs)) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ApiError(400, f"the body has the key {name!r} more than once in one object", name)


def _message(given: Mapping[str, Any]) -> Message:
    # Clients send the message of a response back unchanged, with "refusal": null.
    given = {name: value for name, value in given.items() if value is not None}
    # lm-eval adds "type": "text" to every message.
    if given.get("type") == "text":
        del given["type"]
    unknown = given.keys() - {"role", "content", "name"}
    if unknown:
        raise ApiError(400, f"{sorted(unknown)[0]} of a message is not supported", "messages")
    role, content = given.get("role"), given.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise ApiError(400, f"the role {role!r} is not supported", "messages")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict)
            and part.keys() == {"type", "text"}
            and part["type"] == "text"
            and isinstance(part["text"], str)
            for part in content
        ):
            raise ApiError(400, "the content of a message must be text", "messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(given.get("name", ""), str):
        raise ApiError(400, "the content of a message must be text", "messages")
    # Few templates know the newer role "developer", and many skip unknown roles.
    return {**given, "role": "system" if role == "developer" else role, "content": content}


def _validate(
    request: _CommonRequest,
    prompts: Sequence[Sequence[int]],
    limit: int,
    logprobs: int | None,
    param: str,
    model: ServedModel,
) -> ApiRequest:
    """Return the request to the engine; `limit` is the largest number of tokens per sample."""
    for ids in prompts:
        if not ids:
            raise ApiError(400, "the prompt is empty; at least one token is required", param)
        if len(ids) + limit > model.positions:
            sizes = f"the prompt has {len(ids)} tokens and max_tokens is {limit}"
            raise ApiError(400, f"{sizes}; the sum must be at most {model.positions}", param, "context_length_exceeded")
        outside = [number for number in ids if not 0 <= number < model.vocab_size]
        if outside:
            raise ApiError(400, f"the id {outside[0]} is outside the model's vocabulary of {model.vocab_size}", param)
    stop = (request.stop,) if isinstance(request.stop, str) else request.stop
    if len(stop) > _MAX_STOPS or not all(0 < len(text) <= _MAX_STOP_LENGTH for text in stop):
        allowed = f"at most {_MAX_STOPS} texts of 1 to {_MAX_STOP_LENGTH} characters"
        raise ApiError(400, f"stop: {allowed} are allowed", "stop")
    sampling = SamplingParameters.like(
        request,
        # A larger value has the same effect, but a plan can only carry 64 bits.
        top_k=min(request.top_k, model.vocab_size),
        seed=0,
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
    )
    eos_ids = frozenset[int]() if request.ignore_eos else model.eos_ids
    grammar = _grammar(request.response_format, eos_ids, model)
    samples = []
    for ids in prompts:
        for index in range(request.n):
            seed = secrets.randbits(64) if request.seed is None else request_seed(request.seed, ids, index)
            drawn = replace(sampling, seed=seed)
            samples.append(GenerationRequest(tuple(ids), max(1, limit), drawn, eos_ids, stop, grammar=grammar))
    with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    chat, prompt_tokens = isinstance(request, _ChatRequest), sum(map(len, prompts))
    return ApiRequest(tuple(samples), chat, request.stream, with_usage, logprobs, prompt_tokens)


def _has_schema(request: _CommonRequest) -> bool:
    return request.response_format is not None and request.response_format.type != "text"


def _grammar(wanted: _ResponseFormat | None, eos_ids: frozenset[int], model: ServedModel) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    schema: dict[str, Any] = {"type": "object"}
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise ApiError(400, "response_format: the type json_schema requires json_schema", "response_format")
        schema = wanted.json_schema.schema
    try:
        return json_grammar(schema, model.tokenizer, eos_ids)
    except UserError as error:
        raise ApiError(400, f"response_format: {error}", "response_format") from None
