"""Local files and standard input: JSON lines, plain or compressed, and plain text with one document per file.

A block is as many whole lines as one read of about SPAN_BYTES contains. Of a line that is larger than the limit only
the beginning is kept in memory.
"""

import functools
import gzip
import itertools
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Self

from megatron_ladder.data.reading.protocol import (
    BYTE_ORDER_MARK,
    SPAN_BYTES,
    Block,
    LocalFile,
    Reading,
    Record,
    too_large,
)
from megatron_ladder.errors import Problem, UserError

COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard"}
_LINES_COUNTED_BYTES = 1 << 30
"""After this much of a file, line numbers are not counted, which would take more than a second."""


def _parse_line(line: bytes, reading: Reading) -> list[Any] | Record | str:
    """Return the values of the keys, the whole record, or the reason why the line cannot be read."""
    if len(line) > reading.max_bytes:
        return too_large(reading)
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
        keys = ", ".join(map(repr, record)) or "none"
        reason = "no key {key} (keys found: {keys})"
        return str(Problem({}, reason, reading.fix("key", record), key=repr(missing[0]), keys=keys))
    if reading.texts_only:
        return [record[key] for key in reading.keys]
    values = {key: record[key] for key in reading.all_keys if key in record}
    return Record(values, tuple(key for key in record if key not in values), False)


def _not_utf8(content: bytes, error: UnicodeDecodeError) -> str:
    return f"byte 0x{content[error.start]:02x} is not UTF-8 ({error.reason})"


@functools.lru_cache(maxsize=1)
def _lines_before(path: str, end: int) -> int:
    with open(path, "rb") as file:
        pieces = (file.read(min(SPAN_BYTES, end - start)) for start in range(0, end, SPAN_BYTES))
        return sum(piece.count(b"\n") for piece in pieces)


@dataclass(frozen=True)
class Lines(Block):
    """Whole lines; `begin` is the position of the first one in the text, and `first` its number, if it is known."""

    first: int | None

    @property
    def text_bytes(self) -> int:
        return len(self.content)

    def rows(self) -> Iterator[tuple[int, Sequence[Any] | str]]:
        numbered = enumerate(self._text().split(b"\n"))
        return ((number, _parse_line(line, self.reading)) for number, line in numbered if line and not line.isspace())

    def _text(self) -> bytes:
        content: bytes = self.content
        return content if self.begin else content.removeprefix(BYTE_ORDER_MARK)

    def place(self, number: int) -> str:
        if self.first is None and self.begin > _LINES_COUNTED_BYTES:
            return f"{self.name}: line {number + 1} after byte {self.begin}"
        first = _lines_before(self.name, self.begin) if self.first is None else self.first
        return f"{self.name}:{first + number + 1}"


class _Document(Lines):
    """The content of a file of plain text."""

    def rows(self) -> Iterator[tuple[int, list[Any] | str]]:
        content = self._text()
        try:
            yield 0, too_large(self.reading) if len(content) > self.reading.max_bytes else [content.decode()]
        except UnicodeDecodeError as error:
            yield content.count(b"\n", 0, error.start), _not_utf8(content, error)


class PlainFile(LocalFile):
    """A file of plain text, which is one document and one block."""

    def blocks(self, first: int = 0) -> Iterator[Block]:
        if first == 0:
            with open(self.path, "rb") as file:
                content = file.read(len(BYTE_ORDER_MARK) + self.reading.max_bytes + 1)
            yield _Document(self.reading, self.name, content, 0, self.total_bytes, 0)


@dataclass(frozen=True)
class JsonLinesFile(LocalFile):
    """A file of JSON lines: all of them, or those whose first bytes are in begin .. end - 1."""

    begin: int = 0
    end: int | None = None

    @property
    def total_bytes(self) -> int:
        return super().total_bytes if self.end is None else self.end - self.begin

    @property
    def label(self) -> str:
        return super().label if self.end is None else f"{self.path.name} {self.begin}-{self.end}"

    def shards(self, part_bytes: int | None) -> Iterator[Self]:
        size = self.total_bytes
        for begin in range(0, size, part_bytes or max(size, 1)):
            yield self if part_bytes is None else replace(self, begin=begin, end=min(begin + part_bytes, size))

    def blocks(self, first: int = 0) -> Iterator[Block]:
        """Yield lines; the blocks before the first one are not read."""
        # The difference of one byte is older than ranges; the order of streamed samples depends on it.
        reach = SPAN_BYTES if self.end is None else SPAN_BYTES - 1
        limit = self.begin + self.total_bytes
        with open(self.path, "rb") as file:
            # The previous line may be longer than the range.
            begin = _end_of_line(file, self.begin - 1, limit) if self.begin else 0
            end = _end_of_line(file, limit - 1) if begin < limit else begin
            for number in itertools.count():
                if begin >= end:
                    return
                following = min(_end_of_line(file, begin + reach), end)
                if number >= first:
                    file.seek(begin)
                    content = file.read(min(following - begin, SPAN_BYTES + self.reading.max_bytes + 1))
                    yield Lines(self.reading, self.name, content, begin, following - begin, None)
                begin = following


def _end_of_line(file: BinaryIO, start: int, limit: float = math.inf) -> int:
    """Return the end of the line that contains byte `start`, with its line feed, or a position from `limit` on."""
    file.seek(start)
    while (piece := file.readline(SPAN_BYTES)) and not piece.endswith(b"\n") and file.tell() < limit:
        pass
    return file.tell()


def _cut_lines(
    reading: Reading, name: str, stream: BinaryIO | gzip.GzipFile, position: Callable[[], int] = lambda: 0
) -> Iterator[Lines]:
    """Yield whole lines of a stream; `position` returns the position in the file that the stream decompresses."""
    rest = bytearray()
    begin = lines = before = 0
    for chunk in itertools.chain(iter(lambda: stream.read(SPAN_BYTES), b""), [b""]):
        head, line_feed, tail = chunk.rpartition(b"\n")
        if line_feed or (rest and not chunk):
            content = bytes(rest + head + line_feed)
            after = position()
            yield Lines(reading, name, content, begin, after - before, lines)
            rest = bytearray()
            begin += len(content)
            lines += content.count(b"\n")
            before = after
        if len(rest) <= reading.max_bytes:
            rest += tail


class CompressedLines(LocalFile):
    """A file of JSON lines, compressed as its suffix says."""

    def blocks(self, first: int = 0) -> Iterator[Block]:
        """Yield decompressed lines; raises UserError if the file is damaged or truncated, OSError if reading fails."""
        suffix = self.path.suffix.lower()
        errors = (EOFError, OSError, zlib.error) if suffix == ".gz" else (EOFError, OSError, zstd_module().ZstdError)
        with (
            open(self.path, "rb") as file,
            gzip.GzipFile(fileobj=file) if suffix == ".gz" else zstd_module().ZstdFile(file) as stream,
        ):
            try:
                yield from itertools.islice(_cut_lines(self.reading, self.name, stream, file.tell), first, None)
            except errors as error:
                # Errors of the operating system have a number, those of decompressors do not.
                if isinstance(error, OSError) and error.errno:
                    raise
                raise UserError(f"{self.path}: damaged, or not {COMPRESSIONS[suffix]} ({error})") from None


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

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def identity(self) -> None:
        return None

    def shards(self, part_bytes: int | None) -> Iterator[Self]:
        yield self

    def blocks(self, first: int = 0) -> Iterator[Block]:
        return itertools.islice(_cut_lines(self.reading, "<stdin>", sys.stdin.buffer), first, None)
