"""Output of the command line: text, JSON lines and measurements for stdout, a summary for stderr."""

import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.generate.options import BenchOptions
from megatron_ladder.generate.prompts import Prompt
from megatron_ladder.generate.requests import Generation, NewToken, Timings

_LARGEST_EXPONENT = 700.0
"""Limit that keeps exp() within the range of a float."""


def write_stdout(text: str) -> None:
    """Write and flush. If the reader has closed the pipe, discard this and all later output.

    The program continues, because the other ranks wait for this one.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


class TextOutput:
    """Writes prompts and continuations one after another, although they are generated together.

    Tokens of the first unfinished prompt are written as they come; tokens of later prompts are buffered. If there are
    several prompts, each has a heading. Without a tokenizer the generated ids are written instead of text.
    """

    def __init__(
        self, prompts: Sequence[Prompt], tokenizer: Tokenizer | None, write: Callable[[str], None], repeat: bool = True
    ) -> None:
        """`repeat`: write each prompt before its continuation."""
        self._tokenizer, self._write = tokenizer, write
        self._buffered = [""] * len(prompts)
        for index, prompt in enumerate(prompts):
            if len(prompts) > 1:
                self._buffered[index] = f"--- {index + 1} of {len(prompts)} ---\n"
            if repeat and prompt.text is not None:
                self._buffered[index] += prompt.text
            elif repeat and tokenizer is not None:
                self._buffered[index] += tokenizer.decode(prompt.ids)
        self._finished = [False] * len(prompts)
        self._current = 0
        self._flush()

    def add(self, token: NewToken) -> None:
        """Take the next token of any prompt."""
        self._buffered[token.sample] += f"{token.id} " if self._tokenizer is None else token.text
        if token.finish_reason is not None:
            self._buffered[token.sample] += "\n"
            self._finished[token.sample] = True
        self._flush()

    def _flush(self) -> None:
        while self._current < len(self._buffered):
            self._write(self._buffered[self._current])
            self._buffered[self._current] = ""
            if not self._finished[self._current]:
                return
            self._current += 1


def generation_line(prompt: Prompt, generation: Generation) -> str:
    """Return a finished prompt as a line of JSON."""
    values = {
        "prompt": prompt.text,
        "prompt_ids": generation.prompt_ids,
        "ids": generation.ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": len(generation.prompt_ids),
        "generated_tokens": len(generation.ids),
        **generation.timings._asdict(),
    }
    requested = {"logprobs": generation.logprobs, "top_logprobs": generation.alternatives}
    return json.dumps(values | {name: value for name, value in requested.items() if value is not None}) + "\n"


def summary(generations: Sequence[Generation]) -> str:
    """Return token counts and speeds of a batch in one line."""
    prompt_tokens = sum(len(generation.prompt_ids) for generation in generations)
    new_tokens = sum(len(generation.ids) for generation in generations)
    timings = generations[0].timings
    decode = "" if timings.decode_tokens_per_second is None else f", decode {timings.decode_tokens_per_second:.1f}"
    return (
        f"{len(generations)} prompt{'s' * (len(generations) > 1)}: {prompt_tokens} tokens in, {new_tokens} out; "
        f"first token after {timings.time_to_first_token * 1000:.0f} ms; "
        f"tokens/s: prefill {timings.prefill_tokens_per_second:.1f}{decode}"
    )


def score_line(prompt: Prompt, logprobs: Sequence[float], as_json: bool, per_token: bool) -> str:
    """Return the log-likelihood and perplexity of a text, with `per_token` also each token's log-probability."""
    total = sum(logprobs)
    perplexity = math.exp(min(-total / len(logprobs), _LARGEST_EXPONENT))
    if as_json:
        values = {
            "prompt": prompt.text, "prompt_ids": prompt.ids, "scored_tokens": len(logprobs), "log_likelihood": total,
            "perplexity": perplexity,
        }  # fmt: skip
        return json.dumps(values | ({"logprobs": list(logprobs)} if per_token else {})) + "\n"
    line = f"{len(logprobs)} tokens scored, log-likelihood {total:.4f}, perplexity {perplexity:.4f}\n"
    return line + (" ".join(f"{logprob:.4f}" for logprob in logprobs) + "\n" if per_token else "")


def benchmark_report(rounds: Sequence[Timings], options: BenchOptions, new_tokens: int, as_json: bool) -> str:
    """Return the median, minimum and maximum speed over the rounds of a benchmark."""
    prefill = [timings.prefill_tokens_per_second for timings in rounds]
    decode = [timings.decode_tokens_per_second for timings in rounds if timings.decode_tokens_per_second is not None]
    rates = {"prefill": prefill, "decode": decode} if decode else {"prefill": prefill}
    if as_json:
        values: dict[str, object] = {
            "batch": options.bench_batch, "prompt_tokens": options.bench_prompt, "new_tokens": new_tokens,
            "rounds": len(rounds),
        }  # fmt: skip
        for name, found in rates.items():
            values[f"{name}_tokens_per_second"] = statistics.median(found)
            values[f"{name}_tokens_per_second_range"] = [min(found), max(found)]
        return json.dumps(values) + "\n"
    return "".join(
        f"{name:8} {statistics.median(found):10.1f} tokens/s  ({min(found):.1f} to {max(found):.1f} in {len(found)} "
        f"rounds; batch {options.bench_batch}, {options.bench_prompt} + {new_tokens} tokens)\n"
        for name, found in rates.items()
    )
