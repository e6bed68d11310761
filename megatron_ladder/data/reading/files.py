"""Local files and standard input: JSON lines, plain or compressed, and plain text with one document per file.

msgspec decodes whole blocks of JSON lines at once and skips other keys without building objects. A block that it
rejects is read again line by line with Python's own decoder, which decides what is an error and in which line.

Plain files are cut into spans of whole lines without reading them. Compressed files and standard input can only be
read from their beginning.
"""

import functools
import gzip
import json
import math
import operator
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from megatron_ladder.data.reading.protocol import (
    BYTE_ORDER_MARK,
    SPAN_BYTES,
    BadRecord,
    Block,
    FileSource,
    Parsed,
    Reading,
    WrongInputError,
    parsed_records,
    reason_against,
    too_large,
)

COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard"}
_CHECKED_BYTES = 1 << 12
"""Approximate size of the pieces that are decoded to find bytes that are not UTF-8; pure ASCII is not decoded."""


def _parse_lines(content: bytes, reading: Reading) -> Parsed:
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


@dataclass(frozen=True)
class LineSpan:
    """Bytes begin .. end - 1 of a file, which are whole lines."""

    path: Path
    begin: int
    end: int

    @property
    def text_bytes(self) -> int:
        return self.end - self.begin

    file_bytes = text_bytes

    def read(self, reading: Reading) -> Parsed:
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            content = file.read(self.end - self.begin)
        return _parse_lines(content.removeprefix(BYTE_ORDER_MARK) if self.begin == 0 else content, reading)


@dataclass(frozen=True)
class HugeLine:
    """A line that is skipped because it is too large; `text_bytes` includes its line feed."""

    text_bytes: int
    file_bytes: int

    def read(self, reading: Reading) -> Parsed:
        return Parsed(tuple([] for _ in reading.keys), 1, (BadRecord(0, too_large(self.text_bytes, reading)),))


@dataclass(frozen=True)
class JsonLinesFile(FileSource):
    """An uncompressed file of JSON lines."""

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Yield spans that end at line ends, without reading their content."""
        size = self.total_bytes
        with open(self.path, "rb") as file:
            begin = 0
            while begin < size:
                file.seek(min(begin + SPAN_BYTES, size))
                if len(file.readline(reading.max_bytes + 1)) <= reading.max_bytes:
                    end = file.tell()
                    yield LineSpan(self.path, begin, end)
                else:
                    start = start_of_last_line(file, begin)
                    if start > begin:
                        yield LineSpan(self.path, begin, start)
                    end = end_of_line(file, start)
                    yield HugeLine(end - start, end - start)
                begin = end


def start_of_last_line(file: BinaryIO, begin: int) -> int:
    """Return where the line begins that is not complete within SPAN_BYTES from `begin`."""
    file.seek(begin)
    return begin + file.read(SPAN_BYTES).rfind(b"\n") + 1


def end_of_line(file: BinaryIO, start: int, limit: float = math.inf) -> int:
    """Return the end of the line that contains byte `start`, with its line feed, or a position from `limit` on."""
    file.seek(start)
    while (piece := file.readline(SPAN_BYTES)) and not piece.endswith(b"\n") and file.tell() < limit:
        pass
    return file.tell()


@dataclass(frozen=True)
class PlainFile(FileSource):
    """A file of plain text, which is one document: both the source and its only block."""

    size: int

    @property
    def total_bytes(self) -> int:
        return self.size

    text_bytes = total_bytes
    file_bytes = total_bytes

    def blocks(self, reading: Reading) -> Iterator[Block]:
        yield self

    def read(self, reading: Reading) -> Parsed:
        """Return the text unchanged, except for a byte order mark."""
        if self.size > reading.max_bytes:
            return Parsed(([],), 0, (BadRecord(0, too_large(self.size, reading)),))
        content = self.path.read_bytes().removeprefix(BYTE_ORDER_MARK)
        try:
            return Parsed(([content.decode()],), 0)
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start)
            reason = f"byte 0x{content[error.start]:02x} is not UTF-8 ({error.reason})"
            return Parsed(([],), 0, (BadRecord(line, reason),))


@dataclass(frozen=True)
class _Lines:
    """Whole lines; `file_bytes` of the compressed file were read for them."""

    content: bytes
    file_bytes: int

    @property
    def text_bytes(self) -> int:
        return len(self.content)

    def read(self, reading: Reading) -> Parsed:
        return _parse_lines(self.content, reading)


def _cut_lines(
    stream: BinaryIO | gzip.GzipFile, max_bytes: int, position: Callable[[], int] = lambda: 0
) -> Iterator[_Lines | HugeLine]:
    """Yield whole lines of a stream, about SPAN_BYTES at a time; lines larger than `max_bytes` are not kept in memory.

    `position` returns the position in the file from which the stream is decompressed.
    """
    before = 0

    def file_bytes() -> int:
        nonlocal before
        begin, before = before, position()
        return before - begin

    rest: list[bytes] = []
    first = True
    while chunk := stream.read(SPAN_BYTES):
        if first:
            chunk, first = chunk.removeprefix(BYTE_ORDER_MARK), False
        end = chunk.rfind(b"\n") + 1
        if end:
            yield _Lines(b"".join([*rest, chunk[:end]]), file_bytes())
            rest = [chunk[end:]]
            continue
        rest.append(chunk)
        size = sum(map(len, rest))
        if size > max_bytes:
            while (chunk := stream.read(SPAN_BYTES)) and b"\n" not in chunk:
                size += len(chunk)
            end = chunk.find(b"\n") + 1
            yield HugeLine(size + end, file_bytes())
            # The rest of this chunk may contain whole lines.
            last = chunk.rfind(b"\n") + 1
            if last > end:
                yield _Lines(chunk[end:last], file_bytes())
            rest = [chunk[last:]]
    content = b"".join(rest)
    if content:
        yield _Lines(content, file_bytes())


@dataclass(frozen=True)
class CompressedLines(FileSource):
    """A file of JSON lines, compressed as its suffix says."""

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Yield decompressed lines; raises UserError if the file is damaged or truncated, OSError if reading fails."""
        suffix = self.path.suffix.lower()
        errors = (EOFError, OSError, zlib.error) if suffix == ".gz" else (EOFError, OSError, zstd_module().ZstdError)
        with (
            open(self.path, "rb") as file,
            gzip.GzipFile(fileobj=file) if suffix == ".gz" else zstd_module().ZstdFile(file) as stream,
        ):
            try:
                yield from _cut_lines(stream, reading.max_bytes, file.tell)
            except errors as error:
                # Errors of the operating system have a number, those of decompressors do not.
                if isinstance(error, OSError) and error.errno:
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                raise WrongInputError(
                    f"{self.path}: damaged, or not {COMPRESSIONS[suffix]} ({error}), near byte {file.tell():,} of "
                    f"{self.total_bytes:,}"
                ) from None


def zstd_module() -> Any:
    """Import the standard library's module or its backport; raises ImportError if neither is installed."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


@dataclass(frozen=True)
class StandardInput:
    """JSON lines from standard input. An interrupted run cannot resume, because nothing identifies the input."""

    name = "-"
    total_bytes = None
    can_be_read_again = False

    def identity(self) -> dict[str, Any]:
        return {"input": "-"}

    def place(self, number: int) -> str:
        return f"<stdin>:{number + 1}"

    def blocks(self, reading: Reading) -> Iterator[Block]:
        return _cut_lines(sys.stdin.buffer, reading.max_bytes)
