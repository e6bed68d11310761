"""Local files and standard input: JSON lines, plain or compressed, and plain text with one document per file.

Plain files are cut into spans of whole lines without reading them. Compressed files and standard input can only be
read from their beginning.
"""

import gzip
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ladder.data.reading.protocol import (
    BYTE_ORDER_MARK,
    SPAN_BYTES,
    Block,
    FileShard,
    FileSource,
    Parsed,
    Reading,
    Shard,
    parsed_records,
    reason_against,
    too_large,
)
from megatron_ladder.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard"}
_LINES_COUNTED_BYTES = 1 << 30
"""After this much of a file, line numbers are not counted, which would take more than a second."""


def _parse_lines(content: bytes, reading: Reading) -> Parsed:
    """Return the documents of whole lines (the last one may lack its line feed)."""
    numbered = enumerate(content.split(b"\n"))
    rows = ((number, _parse_line(line, reading)) for number, line in numbered if line and not line.isspace())
    return parsed_records(rows, reading)


def _parse_line(line: bytes, reading: Reading) -> list[Any] | str:
    """Return the values of the keys, or the reason why the line cannot be read."""
    if len(line) > reading.max_bytes:
        return too_large(len(line), reading)
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return _not_utf8(line, error)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"unreadable JSON: {error}"
    if not isinstance(record, dict):
        return f"expected a JSON object, found {type(record).__name__}"
    missing = [key for key in reading.keys if key not in record]
    if missing:
        found = ", ".join(map(repr, record)) or "none"
        return f"no key {missing[0]!r} (keys found: {found}): {reading.fix('key', record)}"
    values = [record.get(key) for key in reading.all_keys]
    return reason_against(values, reading) or values


def _not_utf8(content: bytes, error: UnicodeDecodeError) -> str:
    return f"byte 0x{content[error.start]:02x} is not UTF-8 ({error.reason})"


@dataclass(frozen=True)
class _LineSpan:
    """Bytes begin .. end - 1 of a file, which are whole lines."""

    path: Path
    begin: int
    end: int

    @property
    def text_bytes(self) -> int:
        return self.end - self.begin

    file_bytes = text_bytes

    def read(self, reading: Reading) -> Parsed:
        if self.text_bytes > SPAN_BYTES + reading.max_bytes:
            # Only a single line makes a span so large; it is never held in memory.
            return parsed_records([(0, too_large(self.text_bytes, reading))], reading)
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            content = file.read(self.end - self.begin)
        return _parse_lines(content.removeprefix(BYTE_ORDER_MARK) if self.begin == 0 else content, reading)

    def place(self, number: int) -> str:
        if self.begin > _LINES_COUNTED_BYTES:
            return f"{self.path}: line {number + 1} after byte {self.begin}"
        with open(self.path, "rb") as file:
            pieces = (file.read(min(SPAN_BYTES, self.begin - start)) for start in range(0, self.begin, SPAN_BYTES))
            lines = sum(piece.count(b"\n") for piece in pieces)
        return f"{self.path}:{lines + number + 1}"


@dataclass(frozen=True)
class _LineRange(FileShard):
    """The lines of a file whose first bytes are in begin .. end - 1, or all lines."""

    begin: int
    end: int
    is_whole: bool

    @property
    def total_bytes(self) -> int:
        return self.end - self.begin

    @property
    def label(self) -> str:
        return f"{self.path.name} {self.end}" if self.is_whole else f"{self.path.name} {self.begin}-{self.end}"

    def blocks(self, reading: Reading, first: int = 0) -> Iterator[Block]:
        """Yield spans that end at line ends, without reading their content."""
        return islice(self._spans(reading), first, None)

    def _spans(self, reading: Reading) -> Iterator[Block]:
        # The difference of one byte is older than ranges; the order of streamed samples depends on it.
        reach = SPAN_BYTES if self.is_whole else SPAN_BYTES - 1
        with open(self.path, "rb") as file:
            # The previous line may be longer than the range.
            begin = _end_of_line(file, self.begin - 1, self.end) if self.begin else 0
            end = _end_of_line(file, self.end - 1) if begin < self.end else begin
            while begin < end:
                following = min(_end_of_line(file, begin + reach), end)
                last = begin
                if following - begin > SPAN_BYTES + reading.max_bytes:
                    file.seek(begin)
                    last += file.read(SPAN_BYTES).rfind(b"\n") + 1
                if last > begin:
                    yield _LineSpan(self.path, begin, last)
                yield _LineSpan(self.path, last, following)
                begin = following


def _end_of_line(file: BinaryIO, start: int, limit: float = math.inf) -> int:
    """Return the end of the line that contains byte `start`, with its line feed, or a position from `limit` on."""
    file.seek(start)
    while (piece := file.readline(SPAN_BYTES)) and not piece.endswith(b"\n") and file.tell() < limit:
        pass
    return file.tell()


@dataclass(frozen=True)
class JsonLinesFile(FileSource):
    """An uncompressed file of JSON lines."""

    def shards(self, reading: Reading, part_bytes: int | None) -> Iterator[Shard]:
        size = self.total_bytes
        step = part_bytes or max(size, 1)
        for begin in range(0, size, step):
            yield _LineRange(self.path, begin, min(begin + step, size), part_bytes is None)


@dataclass(frozen=True)
class _WholeFile(FileShard):
    """A file that is not cut: the source and its only shard."""

    def shards(self, reading: Reading, part_bytes: int | None) -> Iterator[Any]:
        yield self


@dataclass(frozen=True)
class PlainFile(_WholeFile):
    """A file of plain text, which is one document and one block."""

    @property
    def text_bytes(self) -> int:
        return self.total_bytes

    file_bytes = text_bytes

    def blocks(self, reading: Reading, first: int = 0) -> Iterator[Block]:
        if first == 0:
            yield self

    def read(self, reading: Reading) -> Parsed:
        """Return the text unchanged, except for a byte order mark."""
        size = self.total_bytes
        if size > reading.max_bytes:
            return parsed_records([(0, too_large(size, reading))], reading)
        content = self.path.read_bytes().removeprefix(BYTE_ORDER_MARK)
        try:
            return parsed_records([(0, [content.decode()])], reading)
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start)
            return parsed_records([(line, _not_utf8(content, error))], reading)

    def place(self, number: int) -> str:
        return f"{self.path}:{number + 1}"


@dataclass(frozen=True)
class _Lines:
    """Whole lines in memory, or a line of `oversized` bytes that is skipped; `first` is the number of the first one.

    `file_bytes` of the compressed file were read for them.
    """

    name: str
    first: int
    content: bytes
    file_bytes: int
    oversized: int = 0

    @property
    def text_bytes(self) -> int:
        return len(self.content)

    def read(self, reading: Reading) -> Parsed:
        if self.oversized:
            return parsed_records([(0, too_large(self.oversized, reading))], reading)
        return _parse_lines(self.content, reading)

    def place(self, number: int) -> str:
        return f"{self.name}:{self.first + number + 1}"


def _cut_lines(
    name: str, stream: BinaryIO | gzip.GzipFile, max_bytes: int, position: Callable[[], int] = lambda: 0
) -> Iterator[_Lines]:
    """Yield whole lines of a stream, about SPAN_BYTES at a time; lines larger than `max_bytes` are not kept in memory.

    `position` returns the position in the file from which the stream is decompressed.
    """
    rest: list[bytes] = []
    size = lines = before = 0

    def cut(content: bytes, oversized: int = 0) -> _Lines:
        nonlocal lines, before
        found = _Lines(name, lines, content, position() - before, oversized)
        lines, before = lines + (1 if oversized else content.count(b"\n")), position()
        return found

    while chunk := stream.read(SPAN_BYTES):
        if lines == size == 0:
            chunk = chunk.removeprefix(BYTE_ORDER_MARK)
        if size > max_bytes:
            end = chunk.find(b"\n") + 1
            size += end or len(chunk)
            if not end:
                continue
            yield cut(b"", size)
            chunk, size = chunk[end:], 0
        end = chunk.rfind(b"\n") + 1
        if end:
            yield cut(b"".join([*rest, chunk[:end]]))
            rest, size = [], 0
        rest.append(chunk[end:])
        size += len(chunk) - end
        if size > max_bytes:
            rest = []
    if size:
        yield cut(b"", size) if size > max_bytes else cut(b"".join(rest))


@dataclass(frozen=True)
class CompressedLines(_WholeFile):
    """A file of JSON lines, compressed as its suffix says."""

    def blocks(self, reading: Reading, first: int = 0) -> Iterator[Block]:
        """Yield decompressed lines; raises UserError if the file is damaged or truncated, OSError if reading fails."""
        return islice(self._lines(reading), first, None)

    def _lines(self, reading: Reading) -> Iterator[Block]:
        suffix = self.path.suffix.lower()
        errors = (EOFError, OSError, zlib.error) if suffix == ".gz" else (EOFError, OSError, zstd_module().ZstdError)
        with (
            open(self.path, "rb") as file,
            gzip.GzipFile(fileobj=file) if suffix == ".gz" else zstd_module().ZstdFile(file) as stream,
        ):
            try:
                yield from _cut_lines(str(self.path), stream, reading.max_bytes, file.tell)
            except errors as error:
                # Errors of the operating system have a number, those of decompressors do not.
                if isinstance(error, OSError) and error.errno:
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                raise UserError(
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


class StandardInput:
    """JSON lines from standard input. An interrupted run cannot resume, because nothing identifies the input."""

    name = label = "-"
    total_bytes = None

    def identity(self) -> None:
        return None

    def shards(self, reading: Reading, part_bytes: int | None) -> Iterator[Shard]:
        yield self

    def blocks(self, reading: Reading, first: int = 0) -> Iterator[Block]:
        return islice(_cut_lines("<stdin>", sys.stdin.buffer, reading.max_bytes), first, None)
