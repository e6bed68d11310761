"""The one gate for records of conversations: from the values of a JSON line or the row of a table to messages.

Null, absent and empty are three things. A row of a table has every key of all rows, down to the arguments of a tool
call, and null where a record lacks it; such nulls are removed, except under `content`, where templates ask for null.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from megatron_ladder.data.reading.protocol import Record
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.typed import typed

Message = dict[str, Any]
"""`role`, `content` (a text, null, or a list of parts `{"type": "text", "text": ...}`), and anything that the template
may read. An answer with tool calls may have no `content`."""
Tools = list[dict[str, Any]] | None
_MEDIA = "is not empty, and this program trains on texts only: remove it, with the texts that refer to it"
_REFUSED = {
    "images": _MEDIA,
    "videos": _MEDIA,
    "audios": _MEDIA,
    "history": "has turns that would be left out: write all turns as a list of messages",
    "loss_mask": 'is not read: give answers that do not count "weight": 0',
}
"""Keys of other programs, which change what is learned, unless they are empty."""
_COUNTING_KEYS = ("train", "loss", "loss_mask")
"""Keys of other programs next to `role`, which choose whether a message counts."""
OPTIONAL_KEYS = ("system", "tools", *_REFUSED)
"""Keys next to the messages: the text of a first message of the system, the tools that the template lists, and keys
that are refused."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""Speakers in ShareGPT's format -> roles; other names are used as roles unchanged."""
T = TypeVar("T")


class ConversationError(UserError):
    """A record is not a conversation, or would lose a part of an answer; the one problem is the reason."""


class ChatRecord(NamedTuple):
    """A conversation."""

    messages: list[Message]
    tools: Tools
    unused: tuple[str, ...]
    """Keys next to the messages that have no effect."""


class _Function(msgspec.Struct):
    name: str | None | UnsetType = UNSET
    arguments: str | dict[str, Any] | None | UnsetType = UNSET


class _ToolCall(_Function):
    function: _Function | None | UnsetType = UNSET


class _Part(msgspec.Struct):
    type: str | None | UnsetType = UNSET
    text: str | None | UnsetType = UNSET


class _Message(msgspec.Struct):
    role: str
    content: str | list[str | dict[str, Any]] | None | UnsetType = UNSET
    tool_calls: list[_ToolCall] | None | UnsetType = UNSET
    weight: float | None | UnsetType = UNSET


def read_record(keys: Sequence[str], record: Record) -> ChatRecord:
    """Return the conversation of a record; raises ConversationError if it is none.

    `keys` names one list of objects with `role` and `content`, or `from` and `value`; or an instruction and an output;
    or an instruction, an input that is appended to it after an empty line, and an output. A text under `system`
    precedes them, and `tools` may be JSON in a text.
    """
    optional = {key: value for key, value in record.values.items() if key not in keys}
    _check_refused(optional, "")
    if len(keys) > 1:
        messages = _read_texts(keys, record.values)
    else:
        messages = _read_messages(keys[0], record.values[keys[0]], record.is_row)
    system = optional.get("system")
    if system not in (None, ""):
        if not isinstance(system, str) or messages[0]["role"] == "system":
            raise ConversationError(
                "'system' next to the messages: expected a text, and no other message of the system"
            )
        messages.insert(0, {"role": "system", "content": system})
    tools = optional.get("tools")
    return ChatRecord(messages, _read_tools(_without_nulls(tools) if record.is_row else tools), record.unread)


def _read_texts(keys: Sequence[str], values: Mapping[str, Any]) -> list[Message]:
    for key in keys:
        # Of three texts, the second one may be null.
        may_be_null = len(keys) == 3 and key == keys[1]
        if not isinstance(values[key], str) and not (may_be_null and values[key] is None):
            raise ConversationError(f"expected a text under {key!r}, found {type(values[key]).__name__}")
    question = "\n\n".join(values[key] for key in keys[:-1] if values[key])
    return [{"role": "user", "content": question}, {"role": "assistant", "content": values[keys[-1]]}]


def _read_messages(key: str, messages: object, is_row: bool) -> list[Message]:
    if not isinstance(messages, list):
        reason = "expected a list of messages under {key}"
        raise ConversationError(Problem({}, reason, "name their key with {chat_keys}", key=repr(key)))
    if not messages:
        raise ConversationError(f"the list of messages under {key!r} is empty")
    parsed = []
    for number, value in enumerate(messages):
        place = f"{key}[{number}]"
        message = _with_role(value, place)
        parsed.append(_read_message(_without_absent(message) if is_row else message, place))
    return parsed


def _with_role(value: Any, place: str) -> Message:
    """Return a message with `role` and `content` instead of ShareGPT's `from` and `value`."""
    if isinstance(value, dict) and isinstance(value.get("role"), str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("from"), str) or value.get("role") is not None:
        raise ConversationError(f"{place}: expected an object with a 'role'")
    content = {"content": value["value"]} if "value" in value else {}
    others = {key: item for key, item in value.items() if key not in ("from", "value", "role", "content")}
    return {"role": _SHAREGPT_ROLES.get(value["from"], value["from"]), **content, **others}


def _without_absent(message: Message) -> Message:
    """Remove a table's nulls from a message; a content that lacks next to tool calls is null, as in OpenAI's format."""
    present = {key: _without_nulls(item) for key, item in message.items() if item is not None or key == "content"}
    return {"content": None, **present} if present.get("tool_calls") else present


def _without_nulls(value: Any) -> Any:
    """Remove the keys whose value is null from all objects in a value; elements of a list stay."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _read_message(message: Message, place: str) -> Message:
    fields = _convert(message, _Message, place)
    if isinstance(fields.content, list):
        parts = [_read_part(part, f"{place}.content[{number}]") for number, part in enumerate(fields.content)]
        text = "".join(part["text"] for part in parts)
        # Templates that read lists expect a text in them.
        message = message | {"content": parts if text.strip() else text}
    # A null content next to another text is an absent one in a table.
    has_content = isinstance(fields.content, str | list) or (
        fields.content is None and not any(isinstance(message.get(key), str) for key in ("text", "value"))
    )
    if not has_content and not (message["role"] == "assistant" and fields.tool_calls):
        raise ConversationError(
            f"{place}: no text under 'content' (or 'value', next to 'from'), which only an answer with 'tool_calls' "
            f"may lack; keys found: {', '.join(map(repr, message))}"
        )
    if fields.weight not in (UNSET, None, 0, 1):
        raise ConversationError(f"{place}: weight {fields.weight!r}: expected 0 or 1")
    _check_refused({key: message[key] for key in message if key not in _COUNTING_KEYS}, f"{place}: ")
    counts = message["role"] == "assistant" and fields.weight != 0
    for key in _COUNTING_KEYS:
        if message.get(key) not in (None, counts):
            raise ConversationError(
                f'{place}: {key!r} is not read: only answers count in the loss, without those with "weight": 0'
            )
    for number, call in enumerate(fields.tool_calls or ()):
        for name, function in (("", call), (".function", call.function or UNSET)):
            if isinstance(function, _Function):
                _check_arguments(function.arguments, f"{place}.tool_calls[{number}]{name}.arguments")
    # Some templates expect a call wherever there is the key.
    without_effect: list[tuple[str, Any]] = [("weight", None), ("tool_calls", [])]
    return {key: item for key, item in message.items() if (key, item) not in without_effect}


def _check_refused(values: Mapping[str, Any], place: str) -> None:
    for key, reason in _REFUSED.items():
        if values.get(key):
            raise ConversationError(f"{place}{key!r} {reason}")


def _read_part(part: str | dict[str, Any], place: str) -> dict[str, Any]:
    """Return a part of a content in its long form; raises ConversationError for a part that is no text."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    fields = _convert(part, _Part, place)
    if fields.type not in (UNSET, None, "text") or not isinstance(fields.text, str):
        raise ConversationError(f"{place}: is {fields.type!r}, but only parts of type 'text', with a text, can be read")
    return {"type": "text", "text": fields.text}


def _check_arguments(arguments: object, place: str) -> None:
    """Raise ConversationError for the arguments of a tool call that are a text, but not an object in JSON."""
    if isinstance(arguments, str) and arguments.strip():
        _convert(_parse(arguments, place), dict[str, Any], place)


def _read_tools(tools: object) -> Tools:
    tools = _parse(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    return _convert(tools, list[dict[str, Any]], "tools") if tools else None


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConversationError(f"{place}: not JSON: {error}") from None


def _convert(value: Any, kind: type[T], place: str) -> T:
    """Return a value as its type; raises ConversationError if it has another one."""
    try:
        return typed(value, kind)
    except ValueError as error:
        raise ConversationError(f"{place}: {error}") from None
