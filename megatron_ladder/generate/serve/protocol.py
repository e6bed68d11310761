"""Requests of OpenAI's API: parse and validate a JSON body, and turn it into requests to the engine.

No parameter is ignored silently. An unknown or unsupported parameter is rejected by name, unless its value requests
what happens anyway.
"""

import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

import msgspec

from megatron_ladder.data.chat_template import ChatTemplate, ChatTemplateError, Message
from megatron_ladder.generate.options import (
    LARGEST_PENALTY,
    LARGEST_REPETITION_PENALTY,
    MAX_ALTERNATIVES,
    SMALLEST_REPETITION_PENALTY,
)
from megatron_ladder.generate.requests import GenerationRequest
from megatron_ladder.generate.sampling import SamplingParameters, request_seed

B = TypeVar("B", bound="_CommonRequest")

_COMPLETION_TOKENS = 16
"""Default max_tokens of a completion, as in OpenAI's API. The default of a chat is the rest of the model's context."""
_MAX_STOPS, _MAX_STOP_LENGTH = 16, 256
_IGNORED = frozenset({"user", "safety_identifier", "metadata"})
"""Parameters that do not affect the response."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},), "echo": (False,), "suffix": ("",),
    "best_of": (1,), "tools": ([],), "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "store": (False,), "service_tier": ("auto", "default"),
}  # fmt: skip
"""Unsupported parameters, with their values that have no effect."""

_PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)]
_RepetitionPenalty = Annotated[float, msgspec.Meta(ge=SMALLEST_REPETITION_PENALTY, le=LARGEST_REPETITION_PENALTY)]
_Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class ApiError(Exception):
    """The error response to a request."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """
        Args:
            status: HTTP status.
            param: name of the invalid parameter.
            code: machine-readable reason.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class _StreamOptions:
    include_usage: bool = False


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


@dataclass(frozen=True, kw_only=True)
class _CompletionRequest(_CommonRequest):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None


@dataclass(frozen=True, kw_only=True)
class _ChatRequest(_CommonRequest):
    messages: list[dict[str, Any]]
    max_completion_tokens: _PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_ALTERNATIVES)] = 0


@dataclass(frozen=True)
class ServedModel:
    """The model as requests see it."""

    name: str
    """Required value of `model`."""
    encode: Callable[[str], tuple[int, ...]]
    """Returns the ids of a text, with the tokenizer's prefix; none for an empty text."""
    encode_chat: Callable[[str], tuple[int, ...]]
    """Returns the ids of a rendered conversation."""
    template: ChatTemplate | None
    """None if the tokenizer has no chat template."""
    vocab_size: int
    positions: int
    """Largest sum of the tokens of prompt and continuation."""
    max_samples: int
    """Largest number of samples of one request."""
    eos_ids: frozenset[int]


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


def parse_completion(body: bytes, model: ServedModel) -> ApiRequest:
    """Parse the body of /v1/completions; raises ApiError."""
    request = _parse(body, _CompletionRequest, model)
    prompts = _prompts(request.prompt, model)
    limit = request.max_tokens or _COMPLETION_TOKENS
    return _validate(request, prompts, [limit] * len(prompts), request.logprobs, "prompt", model)


def parse_chat(body: bytes, model: ServedModel) -> ApiRequest:
    """Parse the body of /v1/chat/completions; raises ApiError."""
    request = _parse(body, _ChatRequest, model)
    if model.template is None:
        raise ApiError(400, "the model's tokenizer has no chat template; use /v1/completions")
    try:
        prompt = model.encode_chat(model.template.prompt([_message(message) for message in request.messages]))
    except ChatTemplateError as error:
        raise ApiError(400, f"the chat template rejects these messages: {error}", "messages") from None
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; use one of them", "max_completion_tokens")
    limit = next(iter(limits), None) or max(1, model.positions - len(prompt))
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")
    logprobs = request.top_logprobs if request.logprobs else None
    return _validate(request, [prompt], [limit], logprobs, "messages", model)


def _parse(body: bytes, kind: type[B], model: ServedModel) -> B:
    try:
        raw = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}") from None
    values = {name: value for name, value in raw.items() if value is not None and name not in _IGNORED}
    known = {entry.name for entry in fields(kind)}
    for name in values.keys() - known:
        if name not in _NEUTRAL:
            raise ApiError(400, f"unknown parameter: {name}", name, "unknown_parameter")
        if values.pop(name) not in _NEUTRAL[name]:
            raise ApiError(400, f"{name} is not supported; remove it", name, "unsupported_parameter")
    try:
        request = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        found = re.search(r"`\$\.(\w+)|required field `(\w+)`", str(error))
        raise ApiError(400, str(error), next(filter(None, found.groups()), None) if found else None) from None
    if request.model != model.name:
        raise ApiError(
            404,
            f"the model {request.model!r} does not exist; this server has {model.name!r}",
            "model",
            "model_not_found",
        )
    if not math.isfinite(request.temperature):
        raise ApiError(400, "temperature must be finite", "temperature")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options requires stream: true", "stream_options")
    return request


def _prompts(given: str | Sequence[str | int | Sequence[int]], model: ServedModel) -> list[tuple[int, ...]]:
    """Return the ids of each prompt. A list can contain texts, ids, or lists of ids."""
    if isinstance(given, str):
        return [model.encode(given)]
    if all(isinstance(part, str) for part in given):
        return [model.encode(str(part)) for part in given]
    ids = [part for part in given if isinstance(part, int)]
    if len(ids) == len(given):
        return [tuple(ids)]
    if all(isinstance(part, list) for part in given):
        return [tuple(part) for part in given if isinstance(part, list)]
    raise ApiError(400, "a list of prompts must contain only texts, only ids, or only lists of ids", "prompt")


def _message(given: Mapping[str, Any]) -> Message:
    """Return a message with its content as one text."""
    # Clients send the message of a response back unchanged, with "refusal": null.
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
    # Few templates know the newer role "developer", and many skip unknown roles.
    return {**given, "role": "system" if role == "developer" else role, "content": content}


def _validate(
    request: _CommonRequest,
    prompts: Sequence[tuple[int, ...]],
    limits: Sequence[int],
    logprobs: int | None,
    param: str,
    model: ServedModel,
) -> ApiRequest:
    count = len(prompts) * request.n
    if not 1 <= count <= model.max_samples:
        raise ApiError(400, f"{count} samples in one request; 1 to {model.max_samples} are allowed", "n")
    for ids, limit in zip(prompts, limits, strict=True):
        _check_prompt(ids, limit, param, model)
    stop = (request.stop,) if isinstance(request.stop, str) else request.stop
    if len(stop) > _MAX_STOPS or not all(0 < len(text) <= _MAX_STOP_LENGTH for text in stop):
        raise ApiError(
            400, f"stop: at most {_MAX_STOPS} texts of 1 to {_MAX_STOP_LENGTH} characters are allowed", "stop"
        )
    eos_ids = frozenset[int]() if request.ignore_eos else model.eos_ids
    samples = [
        GenerationRequest(ids, limit, _sampling(request, _seed(request, ids, index), logprobs, model), eos_ids, stop)
        for ids, limit in zip(prompts, limits, strict=True)
        for index in range(request.n)
    ]
    options = request.stream_options or _StreamOptions()
    prompt_tokens = sum(map(len, prompts))
    chat = isinstance(request, _ChatRequest)
    return ApiRequest(tuple(samples), chat, request.stream, options.include_usage, logprobs, prompt_tokens)


def _check_prompt(ids: Sequence[int], limit: int, param: str, model: ServedModel) -> None:
    if not ids:
        raise ApiError(400, "the prompt is empty; at least one token is required", param)
    outside = [number for number in ids if not 0 <= number < model.vocab_size]
    if outside:
        raise ApiError(400, f"the id {outside[0]} is outside the model's vocabulary of {model.vocab_size}", param)
    if len(ids) + limit > model.positions:
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens and max_tokens is {limit}; the sum must be at most {model.positions}",
            param,
            "context_length_exceeded",
        )


def _seed(request: _CommonRequest, ids: Sequence[int], index: int) -> int:
    """Return the seed of a sample; a random one if the request has none."""
    return secrets.randbits(64) if request.seed is None else request_seed(request.seed, ids, index)


def _sampling(request: _CommonRequest, seed: int, logprobs: int | None, model: ServedModel) -> SamplingParameters:
    return SamplingParameters(
        temperature=request.temperature,
        # A larger value has the same effect, but a plan can only carry 64 bits.
        top_k=min(request.top_k, model.vocab_size),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=seed,
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
    )
