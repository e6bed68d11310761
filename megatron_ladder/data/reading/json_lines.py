"""JSON lines: one object per line, of which the values of some keys are read.

msgspec decodes whole blocks at once and skips other keys without building objects. A block that it rejects is read
again line by line with Python's own decoder, which decides what is an error and in which line.
"""

import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from megatron_ladder.data.reading.protocol import BadRecord, Parsed, Reading, too_large

_LINE_FEED = 10

_CHECKED_BYTES = 1 << 12
"""Approximate size of the pieces that are decoded to find bytes that are not UTF-8; pure ASCII is not decoded."""


def parse_lines(content: bytes, reading: Reading) -> Parsed:
    """Return the documents of whole lines (the last one may lack its line feed)."""
    line_feeds = int(np.count_nonzero(np.frombuffer(content, np.uint8) == _LINE_FEED)) if content else 0
    lines = line_feeds + (bool(content) and not content.endswith(b"\n"))
    if len(content) <= reading.max_bytes:
        columns = _parse_at_once(content, lines, reading)
        if columns is not None:
            return Parsed(columns, lines)
    return _parse_one_by_one(content, lines, reading)


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


def _parse_one_by_one(content: bytes, lines: int, reading: Reading) -> Parsed:
    columns: tuple[list[Any], ...] = tuple([] for _ in reading.keys)
    bad: list[BadRecord] = []
    numbers: list[int] = []
    for number, line in enumerate(_split(content)):
        if not line or line.isspace():
            continue
        try:
            values = _parse_line(line, reading)
        except _BadLineError as error:
            bad.append(BadRecord(number, str(error)))
            if len(bad) > reading.max_bad:
                break
            continue
        numbers.append(number)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return Parsed(columns, lines, tuple(bad), tuple(numbers))


class _BadLineError(Exception):
    """A line cannot be read; the message is the reason."""


def _split(content: bytes) -> Iterator[bytes]:
    begin = 0
    while begin < len(content):
        end = content.find(b"\n", begin)
        end = len(content) if end < 0 else end
        yield content[begin:end]
        begin = end + 1


def _parse_line(line: bytes, reading: Reading) -> list[Any]:
    if len(line) > reading.max_bytes:
        raise _BadLineError(too_large(len(line), reading))
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _BadLineError(f"byte 0x{line[error.start]:02x} is not UTF-8 ({error.reason})") from None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise _BadLineError(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _BadLineError(f"unreadable JSON: {error}") from None
    if not isinstance(record, dict):
        raise _BadLineError(f"expected a JSON object, found {type(record).__name__}")
    missing = [key for key in reading.keys if key not in record]
    if missing:
        found = ", ".join(map(repr, record)) or "none"
        raise _BadLineError(f"no key {missing[0]!r} (keys found: {found}): name the text's key with --json-keys")
    values = [record[key] for key in reading.keys]
    reasons = [reason_against(key, value) for key, value in zip(reading.keys, values, strict=True)]
    wrong = [reason for reason in reasons if reason is not None]
    if wrong and reading.texts_only:
        raise _BadLineError(wrong[0])
    return values


def reason_against(key: str, value: Any) -> str | None:
    """Return why a value is not a text that can be tokenised; None if it is one."""
    if not isinstance(value, str):
        return f"expected a text under {key!r}, found {type(value).__name__}"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(value[error.start]):04x} under {key!r} is half of a surrogate pair"
    return None
