"""Documents in text files: JSON lines (an object a line), or plain text (a file is one document).

A file is read in spans of whole lines, so that several processes can share one. Errors are UserErrors that
begin with `file:line:`.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.errors import UserError

SPAN_BYTES = 1 << 20
"""About how much is read at once: small enough for a lively progress line and little memory."""

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Span(NamedTuple):
    """Bytes begin .. end - 1 of a file: whole lines of a JSON file, or all of a plain one."""

    path: Path
    begin: int
    end: int


def is_json_lines(path: Path) -> bool:
    """Whether a file holds an object a line, by its suffix."""
    return path.suffix.lower() in JSON_SUFFIXES


def check_inputs(paths: Sequence[Path], json_keys: Sequence[str]) -> None:
    """Raises one UserError with a line for each path that cannot be read under these keys."""
    mistakes = []
    for path in paths:
        if not path.is_file():
            found = "is a directory, give its files" if path.is_dir() else "no such file"
            mistakes.append(f"--input {path}: {found}")
        elif not os.access(path, os.R_OK):
            mistakes.append(f"--input {path}: may not be read")
        elif not is_json_lines(path) and tuple(json_keys) != ("text",):
            mistakes.append(
                f"--input {path}: plain text has no keys {' '.join(json_keys)}: leave out --json-keys, "
                f"or give JSON lines ({', '.join(JSON_SUFFIXES)})"
            )
    if mistakes:
        raise UserError(*mistakes)


def spans_of(path: Path) -> Iterator[Span]:
    """Cuts a file of JSON after line ends; a plain text is one span."""
    size = path.stat().st_size
    if not is_json_lines(path):
        yield Span(path, 0, size)
        return
    with open(path, "rb") as file:
        begin = 0
        while begin < size:
            file.seek(min(begin + SPAN_BYTES, size))
            file.readline()
            end = file.tell()
            yield Span(path, begin, end)
            begin = end


def span_groups(paths: Sequence[Path]) -> Iterator[tuple[Span, ...]]:
    """Spans of all files in order, small ones together, about SPAN_BYTES a group."""
    group: list[Span] = []
    for path in paths:
        for span in spans_of(path):
            group.append(span)
            if sum(member.end - member.begin for member in group) >= SPAN_BYTES:
                yield tuple(group)
                group = []
    if group:
        yield tuple(group)


def read_documents(span: Span, json_keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The texts under `json_keys` of each document of a span; an empty text is a text.

    Raises:
        UserError: a line that is not UTF-8, no JSON object, lacks a key, or has no text under one.
    """
    with open(span.path, "rb") as file:
        file.seek(span.begin)
        content = file.read(span.end - span.begin)
    if span.begin == 0:
        content = content.removeprefix(BYTE_ORDER_MARK)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start)
        raise _mistake(
            span, line, f"byte 0x{content[error.start]:02x} is not UTF-8 ({error.reason})"
        ) from None
    if not is_json_lines(span.path):
        yield (text,)
        return
    # Only an escape can bring in half of a surrogate pair, and few spans hold any.
    may_have_surrogates = "\\ud" in text or "\\uD" in text
    for number, line_text in enumerate(text.split("\n")):
        if line_text and not line_text.isspace():
            yield _parse_line(span, number, line_text, json_keys, may_have_surrogates)


def _parse_line(
    span: Span, number: int, line: str, json_keys: Sequence[str], may_have_surrogates: bool
) -> tuple[str, ...]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise _mistake(span, number, f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _mistake(span, number, f"not JSON that can be read: {error}") from None
    if not isinstance(values, dict):
        raise _mistake(span, number, f"a JSON object expected, a {type(values).__name__} found")
    texts = []
    for key in json_keys:
        if key not in values:
            keys = ", ".join(map(repr, values)) or "none"
            raise _mistake(
                span, number, f"no key {key!r} (keys found: {keys}): name the text's key by --json-keys"
            )
        text = values[key]
        if not isinstance(text, str):
            raise _mistake(span, number, f"a text expected under {key!r}, a {type(text).__name__} found")
        if may_have_surrogates:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(text[error.start]):04x}"
                raise _mistake(span, number, f"{half} under {key!r} is half of a character") from None
        texts.append(text)
    return tuple(texts)


def _mistake(span: Span, line: int, reason: str) -> UserError:
    """`line` counts from the span's beginning and from 0."""
    before = 0
    with open(span.path, "rb") as file:
        left = span.begin
        while left > 0 and (block := file.read(min(left, SPAN_BYTES))):
            before += block.count(b"\n")
            left -= len(block)
    return UserError(f"{span.path}:{before + line + 1}: {reason}")
