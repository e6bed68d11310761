"""Chat templates: convert the messages of a conversation to text, and locate the assistant's answers in it.

Templates are in Jinja, in Hugging Face's two places: `chat_template` in tokenizer_config.json, or a file
chat_template.jinja next to it. They run in Jinja's sandbox with the functions that transformers provides, except for
the current time, so that equal messages give equal text.

The assistant's answers are the contents of `{% generation %}` blocks. If a template has no such block, answers are
found by rendering beginnings of the conversation: up to the prompt for an answer, and up to the answer's end.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_ladder.data.tokenizers import parse_json_object
from megatron_ladder.errors import UserError

_CONFIG_FILE, _MAP_FILE, _TEMPLATE_FILE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
_MARKS = "generation_marks"
"""Name of the environment's global that holds the marks."""
Message = dict[str, Any]
"""`role`, `content`, and anything else that the template may read."""


_REASON_CHARACTERS = 1000
"""Characters of a template's error to keep, because a template can raise errors of any length."""


class ChatTemplateError(Exception):
    """A template rejects a conversation; the message is the reason."""


class RenderedConversation(NamedTuple):
    """A conversation as text; the first character and end of each of the assistant's answers, with its end token."""

    text: str
    answers: tuple[tuple[int, int], ...]


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which writes marks around its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        marks: tuple[str, str] = self.environment.globals[_MARKS]  # type: ignore[assignment]
        return caller().join(marks)


class TemplateSource(NamedTuple):
    """A template that is not compiled. Compiling it would already compute its constant expressions."""

    source: str
    tokens: Mapping[str, str]
    """Names such as `bos_token` with their texts."""
    name: str
    """The template's place, for messages."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, tokens: Mapping[str, str], name: str) -> None:
        """The arguments are those of `TemplateSource`; raises UserError if the template is invalid."""
        self.source, self.name = source, name
        # Random, so that no conversation can contain them.
        key = secrets.token_hex(16)
        self._begin, self._end = f"\0{key}[", f"\0{key}]"
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        def to_json(
            value: object,
            ensure_ascii: bool = False,
            indent: int | None = None,
            separators: tuple[str, str] | None = None,
            sort_keys: bool = False,
        ) -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        environment.filters["tojson"] = to_json  # Jinja's own filter escapes < for HTML.
        environment.globals |= {"raise_exception": raise_exception, _MARKS: (self._begin, self._end), **tokens}
        try:
            self._template = environment.from_string(source)
            self._has_generation_blocks = environment.parse(source).find(nodes.ExtensionAttribute) is not None
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"{name}: not a chat template: {error}") from None

    def render(self, messages: Sequence[Message], turn_ends: tuple[str, ...] = ()) -> RenderedConversation:
        """Return the text of a conversation and the positions of the assistant's answers; raises ChatTemplateError.

        `turn_ends` may end an answer; without generation blocks, white space after them does not belong to the answer.
        """
        text = self._render(messages)
        if self._has_generation_blocks:
            return _without_marks(text, self._begin, self._end)
        answers = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise ChatTemplateError(
                    "it renders earlier messages differently when later ones follow, so the assistant's answers cannot "
                    "be located: put {% generation %} and {% endgeneration %} around them in a copy of the template, "
                    "and pass the copy with --chat-template"
                )
            stripped = after.rstrip()
            answers.append((len(before), len(stripped if stripped.endswith(turn_ends) else after)))
        return RenderedConversation(text, tuple(answers))

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text up to the assistant's answer; raises ChatTemplateError if the messages are rejected."""
        text = self._render(messages, add_generation_prompt=True)
        return _without_marks(text, self._begin, self._end).text if self._has_generation_blocks else text

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            # None as in transformers, because templates compare with none, and an undefined value is not none.
            return self._template.render(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # A template is a program, which can raise anything.
            reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise ChatTemplateError(reason[:_REASON_CHARACTERS]) from None


def _without_marks(text: str, begin: str, end: str) -> RenderedConversation:
    """Remove the marks, and return the ranges between them as positions in the text without marks."""
    first, *pieces = text.split(begin)
    plain, answers = first, []
    for piece in pieces:
        answer, _, rest = piece.partition(end)
        answers.append((len(plain), len(plain) + len(answer)))
        plain += answer + rest
    return RenderedConversation(plain, tuple(answers))


def read_chat_template(
    tokenizer_file: Path,
    given: Path | None = None,
    flag: str = "--chat: ",
    fix: str = f"copy one to {_TEMPLATE_FILE} there, or remove --chat",
) -> TemplateSource:
    """Read the template next to a tokenizer.json, or `given`; raises UserError if it is missing or unreadable.

    `flag` begins the error if there is none, and `fix` ends it.
    """
    folder = tokenizer_file.parent
    config, mapped = (
        parse_json_object(file, file.read_bytes()) if file.is_file() else {}
        for file in (folder / _CONFIG_FILE, folder / _MAP_FILE)
    )
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in (mapped | config).items()
        if name.endswith("_token")
    }
    tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
    if given is not None:
        return TemplateSource(_read_text(given, "--chat-template "), tokens, str(given))
    file = folder / _TEMPLATE_FILE
    if file.is_file():
        return TemplateSource(_read_text(file), tokens, str(file))
    templates = config.get("chat_template")
    if isinstance(templates, list):
        # Several named templates; "default" is the one for plain conversations.
        named = (entry for entry in templates if isinstance(entry, dict))
        templates = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if not isinstance(templates, str):
        raise UserError(
            f"{flag}{folder} has no chat template (no {_TEMPLATE_FILE}, and no chat_template in {_CONFIG_FILE}): {fix}"
        )
    return TemplateSource(templates, tokens, str(folder / _CONFIG_FILE))


def _read_text(path: Path, flag: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag}{path}: cannot be read: {error}") from None
