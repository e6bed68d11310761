"""One line of standard input after another: `--interactive`."""

import io
import sys
from collections.abc import Callable
from datetime import timedelta

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.data.chat_template import Message
from megatron_ladder.errors import UserError
from megatron_ladder.generate.engine import GenerationEngine
from megatron_ladder.generate.output import write_stdout
from megatron_ladder.generate.prompts import Prompt, PromptWriter, check_characters, prompt_mistakes
from megatron_ladder.generate.requests import GenerationRequest

AWAY = timedelta(days=30)
"""How long somebody may think about a line; a process that ends is noticed at once."""
MARK = "> "
"""Shown where a line is awaited, if somebody sits there."""


def converse(
    engine: GenerationEngine,
    writer: PromptWriter,
    new_request: Callable[[Prompt], GenerationRequest],
    max_new_tokens: int,
) -> None:
    """Continues each line, and shows text as it comes; every rank must call it, and rank 0 reads the lines.

    In a conversation, what was said before goes with every line. A line that cannot be continued is told of on stderr
    and forgotten.
    """
    earlier: list[Message] = []
    lines = engine.group.over_gloo(AWAY)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A line that is not UTF-8 is told of as a line, and not as an error of reading.
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        prompt: Prompt | None = None
        if engine.group.rank == 0:
            prompt = _next_prompt(writer, earlier, engine.model.config, max_new_tokens)
        prompt = lines.broadcast_object(prompt)
        if prompt is None:
            return
        request = new_request(prompt)
        if engine.group.rank != 0:
            engine.generate([request])
            continue
        if not writer.converses and prompt.text is not None:
            write_stdout(prompt.text)
        (generation,) = engine.generate([request], lambda token: write_stdout(token.text))
        write_stdout("\n")
        if writer.converses:
            earlier.append({"role": "user", "content": prompt.text})
            earlier.append({"role": "assistant", "content": generation.text})


def _next_prompt(
    writer: PromptWriter, earlier: list[Message], config: ModelConfig, max_new_tokens: int
) -> Prompt | None:
    """The next line that can be continued; None at the end of standard input."""
    while True:
        if sys.stdin.isatty():
            print(MARK, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return None
        text = line.rstrip("\r\n")
        if not text:
            continue
        try:
            check_characters("this line", text)
            prompt = Prompt("this line", text, writer.ids(text, earlier))
            mistakes = prompt_mistakes([prompt], config, max_new_tokens)
        except UserError as error:
            mistakes = list(error.mistakes)
        if not mistakes:
            return prompt
        print(*mistakes, sep="\n", file=sys.stderr, flush=True)
