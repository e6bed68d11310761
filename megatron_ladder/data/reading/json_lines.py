"""JSON lines: one object per line, of which the values of some keys are read.

msgspec decodes whole blocks at once and skips other keys without building objects. A block that it rejects is read
again line by line with Python's own decoder, which decides what is an error and in which line.
"""

import functools
import json
import operator
from typing import Any

import msgspec

from megatron_ladder.data.reading.protocol import Parsed, Reading, parsed_records, too_large

_CHECKED_BYTES = 1 << 12
"""Approximate size of the pieces that are decoded to find bytes that are not UTF-8; pure ASCII is not decoded."""


def parse_lines(content: bytes, reading: Reading) -> Parsed:
    """Return the documents of whole lines (the last one may lack its line feed)."""
    lines = content.count(b"\n") + (bool(content) and not content.endswith(b"\n"))
    if len(content) <= reading.max_bytes:
        columns = _parse_at_once(content, lines, reading)
        if columns is not None:
            return Parsed(columns, lines)
    numbered = enumerate(content.split(b"\n"))
    rows = ((number, _parse_line(line, reading)) for number, line in numbered if line and not line.isspace())
    return parsed_records(rows, lines, reading)


@functools.cache
def _decoder(keys: tuple[str, ...], texts_only: bool) -> Any:
    names = [f"value{place}" for place in range(len(keys))]
    fields: list[tuple[str, Any]] = [(name, str if texts_only else Any) for name in names]
    record = msgspec.defstruct("Record", fields, rename=dict(zip(names, keys, strict=True)), gc=not texts_only)
    return msgspec.json.Decoder(record)


def _parse_at_once(content: bytes, lines: int, reading: Reading) -> tuple[list[Any], ...] | None:
    """Return the columns, or None if the content has anything unusual."""
    try:
        _check_utf8(content)  # msgspec checks only the values of the keys.
        records = _decoder(reading.keys, reading.texts_only).decode_lines(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if len(records) != lines:
        return None
    return tuple(list(map(operator.attrgetter(f"value{place}"), records)) for place in range(len(reading.keys)))


def _check_utf8(content: bytes) -> None:
    """Raise UnicodeDecodeError for invalid UTF-8. A piece ends after a space, which is part of no other character."""
    if content.isascii():
        return
    begin = 0
    while begin < len(content):
        end = content.find(b" ", begin + _CHECKED_BYTES) + 1 or len(content)
        piece = content[begin:end]
        if not piece.isascii():
            piece.decode()
        begin = end


def _parse_line(line: bytes, reading: Reading) -> list[Any] | str:
    """Return the values of the keys, or the reason why the line cannot be read."""
    if len(line) > reading.max_bytes:
        return too_large(len(line), reading)
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"byte 0x{line[error.start]:02x} is not UTF-8 ({error.reason})"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"unreadable JSON: {error}"
    if not isinstance(record, dict):
        return f"expected a JSON object, found {type(record).__name__}"
    missing = [key for key in reading.keys if key not in record]
    if missing:
        found = ", ".join(map(repr, record)) or "none"
        return f"no key {missing[0]!r} (keys found: {found}): name the text's key with --json-keys"
    values = [record[key] for key in reading.keys]
    reasons = map(reason_against, reading.keys, values) if reading.texts_only else ()
    return next((reason for reason in reasons if reason is not None), values)


def reason_against(key: str, value: Any) -> str | None:
    """Return why a value is not a text that can be tokenized; None if it is one."""
    if not isinstance(value, str):
        return f"expected a text under {key!r}, found {type(value).__name__}"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(value[error.start]):04x} under {key!r} is half of a surrogate pair"
    return None
