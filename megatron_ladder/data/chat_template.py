"""A tokenizer's own template: from the messages of a conversation to its text, and to what the assistant says in it.

Templates are Jinja, as Hugging Face keeps them: `chat_template` in tokenizer_config.json, or a file chat_template.jinja
beside it. They run in Jinja's sandbox, with what transformers gives them, but without the time of day, so that equal
messages give equal text.

What the assistant says is what stands inside of `{% generation %}`. Where a template has no such block it is found by
rendering the beginning of the conversation: up to the prompt for an answer, and up to the answer's end.
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

from megatron_ladder.errors import UserError

CONFIG_FILE, MAP_FILE, TEMPLATE_FILE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
MARKS = "generation_marks"
"""Name of the global that the environment keeps them under."""
Message = dict[str, Any]
"""`role`, `content`, and what else the template may ask for."""


class NotRendered(Exception):
    """A template that does not take a conversation, and why."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """First character and end of each thing that the assistant says, in order; the mark of its end included."""


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which writes marks around what stands inside."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        marks: tuple[str, str] = self.environment.globals[MARKS]  # type: ignore[assignment]
        return caller().join(marks)


class ChatTemplate:
    """One template, and the special tokens that it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str], name: str) -> None:
        """
        Args:
            tokens: `bos_token` and the like -> the token's text.
            name: of the file, for messages.

        Raises:
            UserError: the template is not Jinja.
        """
        self.source, self.name = source, name
        # Nobody can write these into a conversation.
        key = secrets.token_hex(16)
        self._begin, self._end = f"\0{key}[", f"\0{key}]"
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise, MARKS: (self._begin, self._end), **tokens,
        }  # fmt: skip
        try:
            self._template = environment.from_string(source)
            self._tells = environment.parse(source).find(nodes.ExtensionAttribute) is not None
        except jinja2.TemplateError as error:
            raise UserError(f"{name}: not a chat template: {error}") from None

    def render(self, messages: Sequence[Message], turn_ends: tuple[str, ...] = ()) -> Rendered:
        """
        Args:
            turn_ends: tokens that may end what the assistant says. White space that a template without generation
                blocks writes after one is not said by the assistant.

        Raises:
            NotRendered: the template does not take these messages, or what the assistant says cannot be told.
        """
        text = self._render(messages)
        if self._tells:
            return _without_marks(text, self._begin, self._end)
        answers = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise NotRendered(
                    "it writes earlier messages otherwise when later ones follow, so what the assistant says cannot be "
                    "told: put {% generation %} and {% endgeneration %} around that in a copy of it, and give the copy "
                    "by --chat-template"
                )
            said = after.rstrip()
            answers.append((len(before), len(said if said.endswith(turn_ends) else after)))
        return Rendered(text, tuple(answers))

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to where the assistant is to answer.

        Raises:
            NotRendered: the template does not take these messages.
        """
        text = self._render(messages, add_generation_prompt=True)
        return _without_marks(text, self._begin, self._end).text if self._tells else text

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise NotRendered(str(error)) from None


def _without_marks(text: str, begin: str, end: str) -> Rendered:
    """What stands between the marks, by places in the text without them."""
    first, *pieces = text.split(begin)
    plain, answers = first, []
    for piece in pieces:
        answer, _, rest = piece.partition(end)
        answers.append((len(plain), len(plain) + len(answer)))
        plain += answer + rest
    return Rendered(plain, tuple(answers))


def load_chat_template(tokenizer_file: Path, given: Path | None) -> ChatTemplate:
    """The template of a tokenizer.json's folder, or the one in a given file.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    folder = tokenizer_file.parent
    config = _read_object(folder / CONFIG_FILE)
    tokens = _special_tokens(_read_object(folder / MAP_FILE) | config)
    if given is not None:
        return ChatTemplate(_read_text(given, "--chat-template "), tokens, str(given))
    beside = folder / TEMPLATE_FILE
    if beside.is_file():
        return ChatTemplate(_read_text(beside), tokens, str(beside))
    templates = config.get("chat_template")
    if isinstance(templates, list):
        # Several by name, of which this is the one for plain conversations.
        templates = next((entry.get("template") for entry in templates if entry.get("name") == "default"), None)
    if not isinstance(templates, str):
        raise UserError(
            f"--chat: {folder} has no chat template (no {TEMPLATE_FILE}, and no chat_template in {CONFIG_FILE}): give "
            "one by --chat-template FILE"
        )
    return ChatTemplate(templates, tokens, str(folder / CONFIG_FILE))


def _special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, each as text; a file may say more of one."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in values.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    return values if isinstance(values, dict) else {}


def _read_text(path: Path, flag: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag}{path}: cannot be read: {error}") from None


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """Jinja's own would write < as an escape, for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
