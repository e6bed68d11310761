"""What generated text looks like on stdout, and its statistics on stderr."""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.generate.prompts import Prompt
from megatron_ladder.generate.requests import Generation, NewToken

LARGEST_EXPONENT = 700.0
"""Of e, before a float overflows."""


def write_stdout(text: str) -> None:
    """Writes at once. When nobody reads any more, what is left goes nowhere: other ranks count on this one."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class TextOutput:
    """Prompts with their continuations, one after another, though they are generated side by side.

    The first that is not finished is shown as it grows; what comes for later ones waits. Several prompts get a
    heading each. Without a tokenizer, the generated ids stand for the text.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer | None,
        write: Callable[[str], None],
        repeat: bool = True,
    ) -> None:
        """`repeat`: write each prompt before its continuation."""
        self._write = write
        self._repeat = repeat
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._waiting = ["" for _ in prompts]
        self._finished = [False for _ in prompts]
        self._current = 0
        self._write(self._beginning(0))

    def add(self, token: NewToken) -> None:
        """Takes the next token of any prompt."""
        self._waiting[token.sample] += f"{token.id} " if self._tokenizer is None else token.text
        self._finished[token.sample] = token.finish_reason is not None
        while self._current < len(self._prompts):
            self._write(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._finished[self._current]:
                return
            self._write("\n")
            self._current += 1
            if self._current < len(self._prompts):
                self._write(self._beginning(self._current))

    def _beginning(self, index: int) -> str:
        prompt = self._prompts[index]
        heading = f"--- {index + 1} of {len(self._prompts)} ---\n" if len(self._prompts) > 1 else ""
        if not self._repeat:
            return heading
        if prompt.text is not None:
            return heading + prompt.text
        return heading if self._tokenizer is None else heading + self._tokenizer.decode(prompt.ids)


def json_line(prompt: Prompt, generation: Generation) -> str:
    """One finished prompt as a JSON object."""
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
    if generation.logprobs is not None:
        values["logprobs"] = generation.logprobs
    if generation.alternatives is not None:
        values["top_logprobs"] = generation.alternatives
    return json.dumps(values) + "\n"


def summary(generations: Sequence[Generation]) -> str:
    """One line about a whole batch."""
    prompt_tokens = sum(len(generation.prompt_ids) for generation in generations)
    new_tokens = sum(len(generation.ids) for generation in generations)
    timings = generations[0].timings
    decode = "" if timings.decode_tokens_per_second is None else f", decode {timings.decode_tokens_per_second:.1f}"
    return (
        f"{len(generations)} prompt{'s' * (len(generations) > 1)}: {prompt_tokens} tokens in, {new_tokens} out; "
        f"first token after {timings.time_to_first_token * 1000:.0f} ms; "
        f"tokens/s: prefill {timings.prefill_tokens_per_second:.1f}{decode}"
    )


def score_line(prompt: Prompt, logprobs: Sequence[float], as_json: bool, each: bool) -> str:
    """What a text's tokens but the first have together as log-probability, and its perplexity.

    Args:
        each: tell each token's as well.
    """
    total = sum(logprobs)
    perplexity = math.exp(min(-total / len(logprobs), LARGEST_EXPONENT))
    if as_json:
        values: dict[str, object] = {
            "prompt": prompt.text, "prompt_ids": prompt.ids, "scored_tokens": len(logprobs), "log_likelihood": total,
            "perplexity": perplexity,
        }  # fmt: skip
        return json.dumps(values | {"logprobs": list(logprobs)} if each else values) + "\n"
    line = f"{len(logprobs)} tokens scored, log-likelihood {total:.4f}, perplexity {perplexity:.4f}\n"
    return line + (" ".join(f"{logprob:.4f}" for logprob in logprobs) + "\n" if each else "")
