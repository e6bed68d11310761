"""What generated text looks like on stdout, and its statistics on stderr."""

import json
import os
import sys
from collections.abc import Callable, Sequence

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.generate.engine import Generation, NewToken
from megatron_ladder.generate.prompts import Prompt


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

    def __init__(self, prompts: Sequence[Prompt], tokenizer: Tokenizer | None, write: Callable[[str], None]) -> None:
        self._write = write
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
