"""Requests to the generation engine and their results."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_ladder.generate.sampling import SamplingParameters

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how to continue it."""

    prompt_ids: tuple[int, ...]
    """At least one id; all ids are below the model's vocabulary size."""
    max_new_tokens: int
    """At least 1. Prompt and new tokens together must fit into the model's positions."""
    sampling: SamplingParameters = SamplingParameters()
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end the continuation, in addition to `max_new_tokens` and `stop`."""
    stop: tuple[str, ...] = ()
    """Non-empty strings that end the continuation and are cut from its text. They require a tokenizer."""


class NewToken(NamedTuple):
    """One generated token of one sample."""

    sample: int
    """Index of its request."""
    id: int
    text: str
    """Text that this token completes; the pieces joined are the continuation. Empty without a tokenizer."""
    finish_reason: FinishReason | None
    """Set for the last token of the sample."""


class Timings(NamedTuple):
    """Timings of the whole batch that contained a request, without the time that the caller spends between tokens."""

    time_to_first_token: float
    """In seconds."""
    prefill_tokens_per_second: float
    """Tokens of all prompts, divided by the time to the first token."""
    decode_tokens_per_second: float | None
    """Tokens of all samples after their first, divided by the time after the first; None if there are none."""
    accepted_length: float | None = None
    """Mean tokens of a sample in a decode step: its accepted drafts, and one more. None without drafts or steps."""


@dataclass(frozen=True)
class Generation:
    """The result of a request. Log-probabilities have one entry per token; None if not requested."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """The generated tokens, including the one that ended the continuation."""
    text: str | None
    """Text without the end-of-text token, and cut before a stop string; None without a tokenizer."""
    finish_reason: FinishReason
    timings: Timings
    state_bytes: int
    """What each rank allocates for a sequence of the batch: the states of token mixers, such as keys and values. They
    have positions for the longest prompt with its new tokens, and with captured steps for more."""
    logprobs: tuple[float, ...] | None = None
