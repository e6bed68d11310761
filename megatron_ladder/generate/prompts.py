"""What is to be continued, read and checked before any process group is built."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.data.chat_template import Message, NotRendered, load_chat_template
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


class PromptWriter:
    """From a text to the ids that the model continues."""

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[int], chat: bool, system: str | None) -> None:
        """
        Args:
            prefix: ids before a text that is no conversation, whose template writes its own.
            chat: put the tokenizer's chat template around texts, with a message of the `system` if there is one.

        Raises:
            UserError: there is no chat template, or it cannot be read.
        """
        self._tokenizer, self._prefix = tokenizer, tuple(prefix)
        if chat and not tokenizer.files:
            raise UserError(f"--chat: {tokenizer.kind} has no chat template: leave --chat out")
        self._template = load_chat_template(tokenizer.files[0], None) if chat else None
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    @property
    def converses(self) -> bool:
        """Whether texts are what a user says."""
        return self._template is not None

    def ids(self, text: str, earlier: Sequence[Message] = ()) -> tuple[int, ...]:
        """
        Args:
            earlier: messages of the conversation so far.

        Raises:
            UserError: the template does not take the conversation.
        """
        if self._template is None:
            encoded = self._tokenizer.encode(text)
            return (*self._prefix, *encoded) if encoded else ()
        try:
            rendered = self._template.prompt([*self._system, *earlier, {"role": "user", "content": text}])
        except NotRendered as error:
            raise UserError(f"{self._template.name}: does not take this conversation: {error}") from None
        return tuple(self._tokenizer.encode(rendered))


def check_characters(source: str, text: str) -> None:
    """Raises UserError for a text that no tokenizer takes, as a command line's is that was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{source}: {ascii(text[error.start])} at character {error.start + 1} is no character: give text in UTF-8"
        ) from None


def read_prompts(options: PromptOptions, writer: PromptWriter | None, standard_input: str | None) -> list[Prompt]:
    """All prompts in order: --prompt, --prompt-file, --tokens, standard input.

    Args:
        writer: None without a tokenizer.
        standard_input: what was read there, if that is a prompt.

    Raises:
        UserError: a file cannot be read, a text is none, or there is one and no tokenizer.
    """
    texts = [(f"--prompt {_shortened(text)}", text) for text in options.prompt]
    for path in options.prompt_file:
        texts += _read_file(path)
    if standard_input is not None:
        texts.append(("standard input", standard_input.removesuffix("\n").removesuffix("\r")))
    if texts and writer is None:
        raise UserError(
            f"{texts[0][0]}: the model's directory holds no tokenizer: give --tokenizer-type and --tokenizer-model, "
            "or ids by --tokens"
        )
    prompts = []
    if writer is not None:
        for source, text in texts:
            check_characters(source, text)
            prompts.append(Prompt(source, text, writer.ids(text)))
    if options.tokens:
        prompts.append(Prompt("--tokens", None, token_ids(options.tokens)))
    return prompts


def prompt_mistakes(prompts: Sequence[Prompt], config: ModelConfig, max_new_tokens: int) -> list[str]:
    """One line for each prompt that the model cannot continue by so many tokens, or score if by none."""
    mistakes = []
    for prompt in prompts:
        outside = [number for number in prompt.ids if number >= config.vocab_size]
        needed = len(prompt.ids) + max_new_tokens
        asked = f" and --max-new-tokens {max_new_tokens} are {needed}" if max_new_tokens else ""
        if not prompt.ids:
            mistakes.append(f"{prompt.source}: an empty prompt cannot be continued: give at least one token")
        elif outside:
            mistakes.append(
                f"{prompt.source}: the id {outside[0]} is not one of the model's {config.vocab_size}"
                + (": the tokenizer is of another model" if prompt.text is not None else "")
            )
        elif needed > config.max_position_embeddings:
            mistakes.append(
                f"{prompt.source}: {len(prompt.ids)} tokens{asked}, and the model "
                f"has {config.max_position_embeddings} positions: shorten "
                + ("one of them" if max_new_tokens else "the text")
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
