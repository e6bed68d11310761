"""What is asked of the engine, and what it answers."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_ladder.generate.sampling import Alternatives, SamplingParameters

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, and how it is to be continued."""

    prompt_ids: tuple[int, ...]
    """At least one, each below the model's vocabulary size."""
    max_new_tokens: int
    """At least one; with the prompt at most as many as the model has positions."""
    sampling: SamplingParameters = SamplingParameters()
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end the continuation; none means that only `max_new_tokens` and `stop` do."""
    stop: tuple[str, ...] = ()
    """Strings that end the continuation, and are not part of its text; none of them empty. They need a tokenizer."""


class NewToken(NamedTuple):
    """One step of one sample."""

    sample: int
    """Its slot: the index of the request where all were given at once."""
    id: int
    text: str
    """What has become readable with it; the pieces joined are the continuation's text. "" without a tokenizer."""
    finish_reason: FinishReason | None
    """Why it is the sample's last token."""
    logprob: float | None = None
    """By the model alone; None if the request did not ask."""
    alternatives: Alternatives | None = None
    """The likeliest tokens at its place; None if the request did not ask."""


class Timings(NamedTuple):
    """Of the whole batch that a request was in; the time in which the caller holds the loop is left out."""

    time_to_first_token: float
    """Seconds from the request to the first token."""
    prefill_tokens_per_second: float
    """Tokens of all prompts over that time."""
    decode_tokens_per_second: float | None
    """Tokens of all samples after their first, over the time after the first; None when there are none."""


@dataclass(frozen=True)
class Generation:
    """A finished request."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """The generated tokens alone, the one that ended them included."""
    text: str | None
    """Text of the generated tokens, without that of an ending one and from a stop string on; None without a
    tokenizer."""
    finish_reason: FinishReason
    timings: Timings
    logprobs: tuple[float, ...] | None = None
    """Of each token; None if the request did not ask."""
    alternatives: tuple[Alternatives, ...] | None = None
    """Of each place; None if the request did not ask."""
