"""Chat templates: convert the messages of a conversation to text, and locate the assistant's answers in it.

Templates are in Jinja, in Hugging Face's two places: `chat_template` in tokenizer_config.json, or a file
chat_template.jinja next to it. transformers renders them, in its sandbox and with its functions.

The assistant's answers are the contents of `{% generation %}` blocks. If a template has no such block, answers are
found by rendering beginnings of the conversation: up to the prompt for an answer, and up to the answer's end.
"""

import contextlib
import itertools
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.data.chat_records import Message, Tools
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.files import reject_pointer
from megatron_ladder.tokenizers.kinds import Tokenizer
from megatron_ladder.tokenizers.special_tokens import mark_spelled, spelling_pattern
from megatron_ladder.typed import json_object

_CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"
_REASON_CHARACTERS = 1000
"""Characters of a template's error to keep, because a template can raise errors of any length."""
_ANSWER = "An answer"
_BLOCK = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_NO_TIME = "it asks for the current time, and equal conversations must give equal tokens"
_FIXED_TIME = "write a fixed date in a copy of the template, and pass the copy with {chat_template}"


class ChatTemplateError(UserError):
    """A template rejects a conversation; the one problem is the reason."""


class RenderedConversation(NamedTuple):
    """A conversation as text; the first character and end of each of the assistant's answers, with its end token."""

    text: str
    answers: tuple[tuple[int, int], ...]
    spelled: tuple[int, ...] = ()
    """The first character of each special token that a message, not the template, spells."""
    unused: tuple[str, ...] = ()
    """Names of what the template does not use of the conversation."""


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
            reason = "{}: needs transformers, which the extra hf installs"
            raise UserError(Problem({"chat": None}, reason, 'pip install -e ".[hf]"')) from None
        self.source = source
        self.name = name
        self._tokens = tokens
        self._library = render_jinja_template
        # Random, so that no conversation can contain them.
        key = secrets.token_hex(16)
        self._begin, self._end = f"\0{key}[", f"\0{key}]"
        self._has_generation_blocks = _BLOCK.search(source) is not None
        # Blocks become calls of a macro that writes marks around its content. Jinja drops the line feed after a macro.
        self._marked = (
            f"{{% macro strftime_now(format) %}}{{{{ raise_exception({_NO_TIME!r}) }}}}{{% endmacro %}}"
            f"{{% macro marked_{key}() %}}{self._begin}{{{{ caller() }}}}{self._end}{{% endmacro %}}\n"
        ) + _BLOCK.sub(lambda tag: tag[1] + ("endcall" if tag[2] else f"call marked_{key}()") + tag[3], source)
        try:
            for template in (source, self._marked):
                render_jinja_template([], chat_template=template)
        except Exception as error:  # Jinja's errors, a RecursionError, or an ImportError for an old Jinja.
            raise UserError(f"{name}: not a chat template: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        turn_ends: tuple[str, ...] = (),
        tools: Tools = None,
        check: Callable[[str], None] = lambda text: None,
    ) -> RenderedConversation:
        """Return the text of a conversation and the positions of the assistant's answers; raises ChatTemplateError.

        The text depends only on the messages: a template cannot ask for the time. `turn_ends` may end an answer;
        without generation blocks, white space after them does not belong to the answer. An answer whose message has
        `weight` 0 does not count. `check` receives the text before answers are located.
        """
        of_assistant = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        weights = [messages[index].get("weight", 1) for index in of_assistant]
        rendered = _without_marks(self._render(self._marked, messages, tools), self._begin, self._end)
        check(rendered.text)
        if not self._has_generation_blocks:
            counting = itertools.compress(of_assistant, weights)
            spans = (self._find_answer(rendered.text, messages, index, turn_ends, tools) for index in counting)
            return rendered._replace(answers=tuple(spans))
        if all(weights):
            return rendered
        if len(weights) != len(rendered.answers):
            raise ChatTemplateError("a message has weight 0, and the template has no generation block per answer")
        return rendered._replace(answers=tuple(itertools.compress(rendered.answers, weights)))

    def _find_answer(
        self, text: str, messages: Sequence[Message], index: int, turn_ends: tuple[str, ...], tools: Tools
    ) -> tuple[int, int]:
        before = self._render(self._marked, messages[:index], tools, add_generation_prompt=True)
        after = self._render(self._marked, messages[: index + 1], tools)
        if not (text.startswith(after) and after.startswith(before)):
            is_prompt = text.startswith(after) and after.startswith(self._render(self._marked, messages[:index], tools))
            reason = (
                "begins an answer otherwise than its prompt for one"
                if is_prompt
                else ("renders earlier messages differently when later ones follow")
            )
            fix = (
                "put {% generation %} and {% endgeneration %} around them in a copy of the template, and pass the copy "
                "with {chat_template}"
            )
            raise ChatTemplateError(Problem({}, f"it {reason}, so the assistant's answers cannot be located", fix))
        stripped = after.rstrip()
        return len(before), len(stripped if stripped.endswith(turn_ends) else after)

    def text(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return the text of a conversation; raises ChatTemplateError if the messages are rejected."""
        return self._render(self.source, messages, tools)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text up to the assistant's answer; raises ChatTemplateError if the messages are rejected."""
        return self._render(self.source, messages, add_generation_prompt=True)

    def beginning(self, messages: Sequence[Message]) -> str:
        """Return the text up to the end of the last message, which can be continued; raises ChatTemplateError."""
        return self._render(self.source, messages, continue_final_message=True)

    def spelling(self, tokenizer: Tokenizer) -> re.Pattern[str] | None:
        """Return a pattern of the tokens that only the template writes: special ones, and the one that ends a turn."""
        end = self.turn_end(token for token in tokenizer.added_tokens if not token.isspace())
        return spelling_pattern({*tokenizer.special_tokens, *filter(None, [end])})

    def find_spelled(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Tools,
        pattern: re.Pattern[str] | None,
        **settings: bool,
    ) -> tuple[int, ...]:
        """Return the first character in a rendered text of each token that the messages, not the template, spell.

        `pattern` finds the tokens, and `settings` are those of the text. Raises ChatTemplateError if the template
        changes the messages when marks are inserted into these spellings.
        """
        # Characters for private use and digits, which templates leave as they are. Nobody can guess the number.
        mark = f"\ue000{secrets.randbits(64)}\ue001"
        marked = []
        for message in messages:
            marked.append({key: mark_spelled(value, pattern, mark) for key, value in message.items()})
            # Templates compare the role, so it must not contain a mark.
            if "role" in message:
                marked[-1]["role"] = message["role"]
        marked_tools = mark_spelled(tools, pattern, mark)
        if (marked, marked_tools) == (list(messages), tools):
            return ()
        text_before, *pieces = self._render(self.source, marked, marked_tools, **settings).split(mark)
        places = []
        for piece in pieces:
            places.append(len(text_before) - 1)
            text_before += piece
        if text_before != text:
            raise ChatTemplateError("it changes a message that spells a special token")
        return tuple(places)

    def turn_end(self, special_tokens: Iterable[str]) -> str | None:
        """Return the special token that the template writes after an answer, if there is one."""
        with contextlib.suppress(ChatTemplateError):
            text = self._render(
                self.source, [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
            )
            after = text.rpartition(_ANSWER)[2].lstrip()
            return max((token for token in special_tokens if after.startswith(token)), key=len, default=None)
        return None

    def _render(self, source: str, messages: Sequence[Message], tools: Tools = None, **settings: bool) -> str:
        try:
            ((text,), _) = self._library(
                [list(messages)], chat_template=source, tools=tools, **settings, **self._tokens
            )
        except Exception as error:  # A template is a program, which can raise anything.
            is_jinjas = type(error).__module__.startswith("jinja2")
            reason = str(error) if is_jinjas else f"{type(error).__name__}: {error}"
            fix = _FIXED_TIME if reason == _NO_TIME else ""
            raise ChatTemplateError(Problem({}, "{reason}", fix, reason=reason[:_REASON_CHARACTERS])) from None
        return str(text)


def _without_marks(text: str, begin: str, end: str) -> RenderedConversation:
    """Remove the marks, and return the ranges between them as positions in the text without marks."""
    first, *pieces = text.split(begin)
    plain = first
    answers = []
    for piece in pieces:
        answer, _, rest = piece.partition(end)
        answers.append((len(plain), len(plain) + len(answer)))
        plain += answer + rest
    return RenderedConversation(plain, tuple(answers))


def read_chat_template(
    tokenizer: Tokenizer,
    template_file: Path | None = None,
    subject: str = "{chat}: ",
    fix: str = f"use a {{tokenizer_model}} with a {_TEMPLATE_FILE} next to it, or remove {{chat}}",
) -> TemplateSource:
    """Return the template that was loaded with a tokenizer, or read `template_file`.

    Raises UserError if it is missing or unreadable, or the tokenizer does not find in a text the tokens that a template
    writes. The templates `subject` and `fix` begin and end the problem if there is none.
    """
    if not tokenizer.finds_tokens:
        reason = f"{subject}{tokenizer.kind} does not recognise special tokens in a text"
        raise UserError(Problem({}, reason, "use HuggingFaceTokenizer with a tokenizer.json"))
    folder = tokenizer.files[0].parent
    tokenizer_files = dict(zip(tokenizer.files, tokenizer.contents, strict=True))
    config = json_object(folder / _CONFIG_FILE, tokenizer_files.get(folder / _CONFIG_FILE, b"{}"))
    mapped = json_object(folder / _MAP_FILE, tokenizer_files.get(folder / _MAP_FILE, b"{}"))
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in (mapped | config).items()
        if name.endswith("_token")
    }
    tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
    file = template_file or folder / _TEMPLATE_FILE
    if template_file is not None or file in tokenizer_files:
        try:
            content = file.read_bytes() if template_file else tokenizer_files[file]
            reject_pointer(file, content)
            return TemplateSource(content.decode(), tokens, str(file))
        except (OSError, UnicodeDecodeError) as error:
            shown = "{chat_template} {file}" if template_file else "{file}"
            raise UserError(Problem({}, f"{shown}: cannot be read: {{error}}", file=file, error=error)) from None
    templates = config.get("chat_template")
    if isinstance(templates, list):
        # Several named templates; "default" is the one for plain conversations.
        named = (entry for entry in templates if isinstance(entry, dict))
        templates = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if not isinstance(templates, str):
        reason = "{folder} has no chat template (no " + f"{_TEMPLATE_FILE}, and no chat_template in {_CONFIG_FILE})"
        raise UserError(Problem({}, subject + reason, fix, folder=folder))
    return TemplateSource(templates, tokens, str(folder / _CONFIG_FILE))


def own_chat_template(tokenizer: Tokenizer | None) -> str | None:
    """Return the template that was loaded with a tokenizer, if there is one."""
    with contextlib.suppress(UserError):
        return None if tokenizer is None else read_chat_template(tokenizer).source
    return None
