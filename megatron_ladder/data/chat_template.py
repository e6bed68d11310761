"""Chat templates: convert the messages of a conversation to text, and locate the assistant's answers in it.

Templates are in Jinja, in Hugging Face's two places: `chat_template` in tokenizer_config.json, or a file
chat_template.jinja next to it. transformers renders them, in its sandbox and with its functions.

The assistant's answers are the contents of `{% generation %}` blocks. If a template has no such block, answers are
found by rendering beginnings of the conversation: up to the prompt for an answer, and up to the answer's end.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ladder.data.tokenizers import parse_json_object
from megatron_ladder.errors import UserError

_CONFIG_FILE, _MAP_FILE, _TEMPLATE_FILE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
Message = dict[str, Any]
"""`role`, `content`, and anything else that the template may read."""

_REASON_CHARACTERS = 1000
"""Characters of a template's error to keep, because a template can raise errors of any length."""
_BLOCK = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_NO_TIME = (
    "it asks for the current time, and equal conversations must give equal tokens: write a fixed date in a copy of the "
    "template, and pass the copy with --chat-template"
)


class ChatTemplateError(Exception):
    """A template rejects a conversation; the message is the reason."""


class RenderedConversation(NamedTuple):
    """A conversation as text; the first character and end of each of the assistant's answers, with its end token."""

    text: str
    answers: tuple[tuple[int, int], ...]


class TemplateSource(NamedTuple):
    """A template that is not compiled."""

    source: str
    tokens: Mapping[str, str]
    """Names such as `bos_token` with their texts."""
    name: str
    """The template's place, for messages."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, tokens: Mapping[str, str], name: str) -> None:
        """The arguments are those of `TemplateSource`; raises UserError if it is invalid or transformers is missing."""
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError:
            raise UserError('--chat: needs transformers, which the extra hf installs: pip install -e ".[hf]"') from None
        self.source, self.name, self._tokens, self._library = source, name, tokens, render_jinja_template
        # Random, so that no conversation can contain them.
        key = secrets.token_hex(16)
        self._begin, self._end = f"\0{key}[", f"\0{key}]"
        self._has_generation_blocks = _BLOCK.search(source) is not None
        # Blocks become calls of a macro that writes marks around its content. Jinja drops the line feed after a macro.
        self._marked = (
            f"{{% macro strftime_now(format) %}}{{{{ raise_exception({_NO_TIME!r}) }}}}{{% endmacro %}}"
            f"{{% macro marked_{key}() %}}{self._begin}{{{{ caller() }}}}{self._end}{{% endmacro %}}\n"
        ) + _BLOCK.sub(lambda tag: f"{tag[1]}{'endcall' if tag[2] else f'call marked_{key}()'}{tag[3]}", source)
        try:
            for one in (source, self._marked):
                render_jinja_template([], chat_template=one)
        except Exception as error:  # Jinja's errors, a RecursionError, or an ImportError for an old Jinja.
            raise UserError(f"{name}: not a chat template: {error}") from None

    def render(self, messages: Sequence[Message], turn_ends: tuple[str, ...] = ()) -> RenderedConversation:
        """Return the text of a conversation and the positions of the assistant's answers; raises ChatTemplateError.

        The text depends only on the messages: a template cannot ask for the time. `turn_ends` may end an answer;
        without generation blocks, white space after them does not belong to the answer.
        """
        text = self._render(self._marked, messages)
        if self._has_generation_blocks:
            return _without_marks(text, self._begin, self._end)
        answers = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(self._marked, messages[:index], add_generation_prompt=True)
            after = self._render(self._marked, messages[: index + 1])
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
        return self._render(self.source, messages, add_generation_prompt=True)

    def _render(self, source: str, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            ((text,), _) = self._library(
                [list(messages)], chat_template=source, add_generation_prompt=add_generation_prompt, **self._tokens
            )
        except Exception as error:  # A template is a program, which can raise anything.
            is_jinjas = type(error).__module__.startswith("jinja2")
            reason = str(error) if is_jinjas else f"{type(error).__name__}: {error}"
            raise ChatTemplateError(reason[:_REASON_CHARACTERS]) from None
        return str(text)


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
