"""Chooses how a template receives conversations, and finds what it leaves out of them.

Conversations are of one kind if they differ only in their texts. The first one of a kind is rendered with a mark
instead of each text, once for each way to write its messages. A mark that the template does not write stands for a text
that it leaves out:

    {"role": "assistant", "tool_calls": [{"function": {"name": "sum", "arguments": "{\\"a\\": 1}"}}]}
    {"role": "assistant", "tool_calls": [{"function": {"name": "(0)", "arguments": "{\\"(1)\\": \\"(2)\\"}"}}]}

A template may also cut a text, for example before `</think>`. So each conversation is searched for the texts of its
answers. If one is not written literally, marks between its tags show whether a part of it is missing:

    <think>because</think>yes  ->  <think>b(0)ecaus(1)e</think>y(2)es
"""

import functools
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_ladder.data.chat_records import ConversationError, Message, Tools
from megatron_ladder.data.chat_template import ChatTemplate, ChatTemplateError
from megatron_ladder.errors import Problem

_ANSWER_TEXTS = ("content", "reasoning_content", "reasoning", "thinking", "refusal")
_ANSWER_KEYS = (*_ANSWER_TEXTS, "tool_calls", "function_call")
"""Keys of what a model says."""
_IDS = ("id", "tool_call_id")
"""Keys that connect the answer of a tool with its call. Some templates check their lengths; few write them."""
_SILENT_KEYS = ("role", "weight", "train", "loss", "loss_mask", *_IDS)
"""Keys of messages that need not occur in the text."""
_MOST_KINDS = 4096
"""Number of kinds that are remembered."""
_SHOWN_CHARACTERS = 60
_TAG = r"<[^<>\s][^<>\n]*>|\[/?[A-Z_]+\]"
_LITERAL = re.compile(r"'([^'\\\n]+)'|\"([^\"\\\n]+)\"")


class Spelling(NamedTuple):
    """How to write the same messages."""

    nulls: bool
    """Whether keys whose value is null stay."""
    parts: bool
    """Whether lists of parts stay; otherwise line feeds join their texts, as in vLLM."""
    objects: bool
    """Whether the arguments of tool calls are objects; otherwise they are JSON in texts."""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        return [self._apply(message) for message in messages]

    def _apply(self, message: Message) -> Message:
        message = {key: value for key, value in message.items() if value is not None or self.nulls}
        if isinstance(message.get("content"), list) and not self.parts:
            message["content"] = "\n".join(part["text"] for part in message["content"])
        if message.get("tool_calls"):
            message["tool_calls"] = [self._apply_to_call(call) for call in message["tool_calls"]]
        return message

    def _apply_to_call(self, call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return call | {"function": self._apply_to_call(call["function"])}
        arguments = call.get("arguments")
        if isinstance(arguments, str) and self.objects:
            return call | {"arguments": json.loads(arguments) if arguments.strip() else {}}
        if isinstance(arguments, dict) and not self.objects:
            return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
        return call


class Kind(NamedTuple):
    """What is known of the conversations of one kind."""

    spelling: Spelling
    """The one to render."""
    unused: tuple[str, ...] = ()
    """Names of what has no effect, for a message."""
    error: Problem | None = None
    """Why they are rejected."""


class _Mark(NamedTuple):
    """A text that shows whether the template writes the text at its place."""

    text: str
    message: int
    """Number of the message; -1 for tools."""
    path: str
    """Keys within the message."""
    segment: str = ""
    """The part of the text in which it is, if it does not stand for the whole text."""


class _Marks(list[_Mark]):
    """Marks with different texts."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def add(self, message: int, path: str, segment: str = "") -> str:
        """Add a mark, and return its text."""
        # Digits, which templates leave as they are.
        self.append(_Mark(f"{self._key}{len(self):06}", message, path, segment))
        return self[-1].text


class ConversationKinds:
    """Finds the kinds of the conversations that a template receives."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        # Nobody can guess the number.
        self._key = f"{secrets.randbits(64):020}"
        self._kinds = dict[str, Kind]()
        self._words = set(re.findall(r"\w+", template.source))
        literals = {literal for pair in _LITERAL.findall(template.source) for literal in pair}
        tags = sorted((text for text in literals if re.search(r"[^\w\s]", text)), key=len, reverse=True)
        self._tags = re.compile("|".join([_TAG, *map(re.escape, tags)]))

    def find(self, messages: Sequence[Message], tools: Tools) -> Kind:
        """Return the kind of a conversation; raises ConversationError if the template leaves out a part of answers."""
        marks = _Marks(self._key)
        marked = [self._mark_message(message, number, marks) for number, message in enumerate(messages)]
        marked_tools = [_mark_name(tool, marks) for tool in tools] if tools else None
        shapes = {(*tool, "function", *tool.get("function", ())) for tool in tools or ()}
        name = repr((marked, sorted(shapes)))
        if name not in self._kinds:
            if len(self._kinds) == _MOST_KINDS:
                self._kinds.clear()
            self._kinds[name] = self._make(messages, marked, marked_tools, marks)
        kind = self._kinds[name]
        if kind.error is not None:
            raise ConversationError(kind.error)
        return kind

    def _mark_message(self, message: Message, number: int, marks: _Marks) -> Message:
        """Return a message with marks instead of texts, and nothing else that differs between messages of a kind."""
        marked = Message()
        of_text = dict[str, str]()
        for key, value in message.items():
            if key in _SILENT_KEYS:
                marked[key] = "0" * len(value) if key in _IDS and isinstance(value, str) else value
            elif key == "tool_calls" and value:
                marked[key] = [_mark_call(call, number, f"{key}[{n}]", marks) for n, call in enumerate(value)]
            elif key in _ANSWER_TEXTS and isinstance(value, str) and value in of_text:
                # vLLM gives the same reasoning under two keys; one of them is enough.
                marked[key] = of_text[value]
            elif isinstance(value, str | list | dict):
                marked[key] = _map_texts(value, functools.partial(_mark_text, number, key, marks))
                if isinstance(value, str):
                    of_text[value] = marked[key]
            elif value is None or key in self._words:
                marked[key] = value
        return marked

    def _make(self, messages: Sequence[Message], marked: list[Message], tools: Tools, marks: _Marks) -> Kind:
        spellings = _spellings_of(marked)
        results = []
        for spelling in spellings:
            try:
                text = self._template.text(spelling.apply(marked), tools)
            except ChatTemplateError:
                continue
            missing = [mark for mark in marks if mark.text not in text]
            of_answers = [mark for mark in missing if _is_of_answer(mark, messages)]
            results.append((self._find_python(text, spelling, marked, tools, marks), of_answers, missing, spelling))
            if not results[-1][0] and not of_answers:
                break
        if not results:
            # The conversation itself is rejected, too, unless the template reads more of a text than that it is one.
            return Kind(spellings[0])
        python, of_answers, missing, spelling = min(results, key=lambda result: (bool(result[0]), len(result[1])))
        if python is not None:
            return Kind(spelling, error=python)
        if of_answers:
            return Kind(spelling, error=self._describe(of_answers[0], messages, marks, missing))
        return Kind(spelling, tuple(self._unused(messages, tools, marks, missing)))

    def _find_python(
        self, text: str, spelling: Spelling, marked: Sequence[Message], tools: Tools, marks: _Marks
    ) -> Problem | None:
        """Return what the template writes of the messages as Python does, instead of as text or JSON, as a problem."""

        def writes(part: str, fix: str = "pass another {chat_template}") -> Problem:
            return Problem({}, "{template} writes {part}", fix, template=self._template.name, part=part)

        for mark in marks:
            if mark.path == "content" and re.search(rf"['\"]text['\"]: ['\"]{re.escape(mark.text)}", text):
                return writes("a list of parts, instead of their texts", "give the message one text")
            if "arguments" in mark.path and re.search(rf"(\{{'|\\\"){re.escape(mark.text)}", text):
                return writes("the arguments of a tool call as Python or as JSON within JSON")
            if f"'name': '{mark.text}" in text and "'name': '" not in self._template.source:
                return writes("tool calls as Python")
        if spelling.nulls and "None" in text:
            without = [{key: "" if value is None else value for key, value in message.items()} for message in marked]
            try:
                empty = self._template.text(spelling.apply(without), tools)
            except ChatTemplateError:
                empty = ""
            if text.count("None") > empty.count("None"):
                return writes("'None' for a key whose value is null", "leave the key out, or give it an empty text")
        return None

    def _describe(self, mark: _Mark, messages: Sequence[Message], marks: _Marks, missing: Sequence[_Mark]) -> Problem:
        """Return that the template leaves out a text of an answer, and what helps."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        part = f"{mark.segment[:_SHOWN_CHARACTERS]!r} in " if mark.segment else ""
        place = f"{part}{mark.path!r} of answer {answers.index(mark.message) + 1} of {len(answers)}"
        fix = "pass a {chat_template} that writes it"
        later = [other for other in marks if other.path == mark.path and other.message > mark.message]
        if any(other not in missing for other in later):
            fix += ', or give the answers before the last one "weight": 0'
        reason = "{template} leaves out {place}, which the model would not learn"
        return Problem({}, reason, fix, template=self._template.name, place=place)

    def _unused(self, messages: Sequence[Message], tools: Tools, marks: _Marks, missing: list[_Mark]) -> Iterator[str]:
        """Yield names of what the template does not use, each once."""
        of_tools = [mark for mark in marks if mark.message < 0]
        if tools and of_tools and all(mark in missing for mark in of_tools):
            yield "'tools'"
        names = dict[str, None]()
        for number, message in enumerate(messages):
            for key, value in message.items():
                if key in _SILENT_KEYS:
                    continue
                own = [mark for mark in marks if (mark.message, mark.path.partition("[")[0]) == (number, key)]
                is_written = any(mark not in missing for mark in own)
                is_read = key in self._words and not (own and key in _ANSWER_KEYS)
                if value and not is_written and not is_read:
                    names[f"{key!r} of the role {message['role']!r}"] = None
        yield from names

    def check_answers(self, text: str, messages: Sequence[Message], tools: Tools) -> None:
        """Raise ConversationError if a rendered conversation lacks a part of the text of an answer."""
        if _has_answers(text, messages):
            return
        marks = _Marks(self._key)
        marked = list(map(dict, messages))
        for number, message in enumerate(messages):
            for key in message.keys() & set(_ANSWER_TEXTS) if _counts(message) else ():
                change = functools.partial(self._mark_segments, number, key, marks)
                marked[number][key] = _map_texts(message[key], change)
        rendered = self._template.text(marked, tools)
        missing = [mark for mark in marks if mark.text not in rendered]
        if missing:
            raise ConversationError(self._describe(missing[0], messages, marks, missing))

    def _mark_segments(self, number: int, path: str, marks: _Marks, text: str) -> str:
        """Return a text with marks after the first and before the last letter of each segment between tags."""
        pieces = list[str]()
        end = 0
        for tag in (*self._tags.finditer(text), None):
            segment = text[end:] if tag is None else text[end : tag.start()]
            letters = list(re.finditer(r"\w", segment)) or list(re.finditer(r"\S", segment))
            begin = 0
            for place in sorted({letters[0].end(), letters[-1].start()} - {0}) if letters else ():
                pieces += [segment[begin:place], marks.add(number, path, segment.strip())]
                begin = place
            pieces += [segment[begin:], "" if tag is None else tag[0]]
            end = len(text) if tag is None else tag.end()
        return "".join(pieces)


def _mark_text(number: int, path: str, marks: _Marks, text: str) -> str:
    return marks.add(number, path) if text.strip() else text


def _mark_call(call: dict[str, Any], number: int, path: str, marks: _Marks) -> dict[str, Any]:
    """Return a tool call with marks instead of the name and the arguments, and without what differs otherwise."""
    marked = dict[str, Any]()
    for key, value in call.items():
        place = f"{path}.{key}"
        if key == "function" and isinstance(value, dict):
            marked[key] = _mark_call(value, number, place, marks)
        elif key == "name" and isinstance(value, str):
            marked[key] = marks.add(number, place)
        elif key == "arguments" and (json.loads(value) if isinstance(value, str) and value.strip() else value):
            arguments = {marks.add(number, place): marks.add(number, place)}
            marked[key] = arguments if isinstance(value, dict) else json.dumps(arguments, ensure_ascii=False)
        else:
            marked[key] = "0" * len(value) if key in _IDS and isinstance(value, str) else value
    return marked


def _mark_name(tool: dict[str, Any], marks: _Marks) -> dict[str, Any]:
    if isinstance(tool.get("function"), dict):
        return tool | {"function": _mark_name(tool["function"], marks)}
    return tool | {"name": marks.add(-1, "name")} if isinstance(tool.get("name"), str) else tool


def _spellings_of(messages: Sequence[Message]) -> list[Spelling]:
    """Return the ways to write messages that differ for these, the preferred one first."""
    has_nulls = any(value is None for message in messages for value in message.values())
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    has_calls = any(message.get("tool_calls") for message in messages)
    choices = [(True, False) if varies else (True,) for varies in (has_nulls, has_parts, has_calls)]
    return [Spelling(*choice) for choice in itertools.product(*choices)]


def _counts(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("weight", 1))


def _is_of_answer(mark: _Mark, messages: Sequence[Message]) -> bool:
    """Return whether a mark stands for something that a model learns to say."""
    return mark.message >= 0 and _counts(messages[mark.message]) and mark.path.partition("[")[0] in _ANSWER_KEYS


def _has_answers(text: str, messages: Sequence[Message]) -> bool:
    """Return whether the texts of all answers that count are in a text literally, each after all earlier messages.

    Another message may quote an answer. If a template writes messages in another order, the result is False.
    """
    begin = 0
    for message in messages:
        parts = list[str]()
        for key in _ANSWER_TEXTS:
            _map_texts(message.get(key), parts.append)
        places = [text.find(part.strip(), begin) for part in parts]
        if -1 not in places:
            begin = max((place + len(part.strip()) for place, part in zip(places, parts, strict=True)), default=begin)
        elif _counts(message):
            return False
    return True


def _map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Return a JSON-able value with other texts; those under `type` stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {key: item if key == "type" else _map_texts(item, change) for key, item in value.items()}
    return value
