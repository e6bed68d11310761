"""What is to be continued, read and checked before any process group is built."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.config.model import ModelConfig
from megatron_ladder.data.reading.formats import BYTE_ORDER_MARK, is_json_lines
from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.generate.options import PromptOptions, token_ids

PROMPT_KEY = "prompt"
SHOWN_CHARACTERS = 40


class Prompt(NamedTuple):
    """Something to continue."""

    source: str
    """Where it was given, for messages: the flag, or file and line."""
    text: str | None
    """None when it was given as ids."""
    ids: tuple[int, ...]


def read_prompts(options: PromptOptions, tokenizer: Tokenizer | None) -> list[Prompt]:
    """All prompts in order: --prompt, --prompt-file, --tokens.

    Raises:
        UserError: a file cannot be read, or there is a text and no tokenizer.
    """
    texts = [(f"--prompt {_shortened(text)}", text) for text in options.prompt]
    for path in options.prompt_file:
        texts += _read_file(path)
    if texts and tokenizer is None:
        raise UserError(
            f"{texts[0][0]}: the model's directory holds no tokenizer: give --tokenizer-type and --tokenizer-model, "
            "or ids by --tokens"
        )
    prompts = []
    if tokenizer is not None:
        prompts = [Prompt(source, text, tuple(tokenizer.encode(text))) for source, text in texts]
    if options.tokens:
        prompts.append(Prompt("--tokens", None, token_ids(options.tokens)))
    return prompts


def prompt_mistakes(prompts: Sequence[Prompt], config: ModelConfig, max_new_tokens: int) -> list[str]:
    """One line for each prompt that the model cannot continue by so many tokens."""
    mistakes = []
    for prompt in prompts:
        outside = [number for number in prompt.ids if number >= config.vocab_size]
        needed = len(prompt.ids) + max_new_tokens
        if not prompt.ids:
            mistakes.append(f"{prompt.source}: an empty prompt cannot be continued: give at least one token")
        elif outside:
            mistakes.append(
                f"{prompt.source}: the id {outside[0]} is not one of the model's {config.vocab_size}"
                + (": the tokenizer is of another model" if prompt.text is not None else "")
            )
        elif needed > config.max_position_embeddings:
            mistakes.append(
                f"{prompt.source}: {len(prompt.ids)} tokens and --max-new-tokens {max_new_tokens} are {needed}, and "
                f"the model has {config.max_position_embeddings} positions: shorten one of them"
            )
    return mistakes


def _shortened(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...")


def _read_file(path: Path) -> list[tuple[str, str]]:
    """Source and text of each prompt of a file."""
    try:
        content = path.read_bytes().removeprefix(BYTE_ORDER_MARK).decode()
    except OSError as error:
        raise UserError(f"--prompt-file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file {path}: not UTF-8: {error.reason} at byte {error.start}") from None
    if not is_json_lines(path):
        return [(f"--prompt-file {path}", content.removesuffix("\n").removesuffix("\r"))]
    prompts = [
        _parse_line(f"--prompt-file {path}:{number}", line)
        for number, line in enumerate(content.split("\n"), start=1)
        if line and not line.isspace()
    ]
    if not prompts:
        raise UserError(f"--prompt-file {path}: holds no line with a prompt")
    return prompts


def _parse_line(source: str, line: str) -> tuple[str, str]:
    try:
        values = json.loads(line)
        text = values[PROMPT_KEY]
        text.encode()
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise UserError(f'{source}: expected a JSON object with a text, as in {{"{PROMPT_KEY}": "Once"}}') from None
    return source, text
