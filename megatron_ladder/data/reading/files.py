"""Local files and standard input: JSON lines, plain or compressed, and plain text with one document per file.

Plain files are cut into spans of whole lines without reading them. Compressed files and standard input can only be
read from their beginning.
"""

import gzip
import math
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_ladder.data.reading.json_lines import parse_lines
from megatron_ladder.data.reading.protocol import (
    BYTE_ORDER_MARK,
    SPAN_BYTES,
    BadRecord,
    Block,
    FileSource,
    Parsed,
    Reading,
    WrongInputError,
    too_large,
)

COMPRESSIONS = {".gz": "gzip", ".zst": "Zstandard"}


@dataclass(frozen=True)
class LineSpan:
    """Bytes begin .. end - 1 of a file, which are whole lines."""

    path: Path
    begin: int
    end: int

    @property
    def text_bytes(self) -> int:
        """Size of the span."""
        return self.end - self.begin

    file_bytes = text_bytes

    def read(self, reading: Reading) -> Parsed:
        """Parse the lines."""
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            content = file.read(self.end - self.begin)
        return parse_lines(content.removeprefix(BYTE_ORDER_MARK) if self.begin == 0 else content, reading)


@dataclass(frozen=True)
class HugeLine:
    """A line that is skipped because it is too large."""

    text_bytes: int
    """Size, including the line feed."""
    file_bytes: int
    """Its share of the file."""

    def read(self, reading: Reading) -> Parsed:
        """Return one bad record."""
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
    """Return the end of the line that contains byte `start`, including its line feed; needs little memory.

    Args:
        limit: stop the search here, and return a position from `limit` on if the line does not end before it.
    """
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
        """Size of the file."""
        return self.size

    text_bytes = total_bytes
    file_bytes = total_bytes

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Yield itself."""
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
    """Whole lines."""

    content: bytes
    file_bytes: int
    """Bytes of the compressed file that were read for these lines."""

    @property
    def text_bytes(self) -> int:
        """Size of the lines."""
        return len(self.content)

    def read(self, reading: Reading) -> Parsed:
        """Parse the lines."""
        return parse_lines(self.content, reading)


class _Cut(NamedTuple):
    content: bytes
    """Whole lines; empty if a line was skipped."""
    skipped: int
    """Size of a line that is too large, else 0."""

    def block(self, file_bytes: int) -> Block:
        return HugeLine(self.skipped, file_bytes) if self.skipped else _Lines(self.content, file_bytes)


def _cut_lines(stream: BinaryIO, max_bytes: int) -> Iterator[_Cut]:
    """Yield whole lines of a stream, about SPAN_BYTES at a time; lines larger than `max_bytes` are not kept in memory.
    """
    rest: list[bytes] = []
    first = True
    while chunk := stream.read(SPAN_BYTES):
        if first:
            chunk, first = chunk.removeprefix(BYTE_ORDER_MARK), False
        end = chunk.rfind(b"\n") + 1
        if end:
            yield _Cut(b"".join([*rest, chunk[:end]]), 0)
            rest = [chunk[end:]]
            continue
        rest.append(chunk)
        size = sum(map(len, rest))
        if size > max_bytes:
            while (chunk := stream.read(SPAN_BYTES)) and b"\n" not in chunk:
                size += len(chunk)
            end = chunk.find(b"\n") + 1
            yield _Cut(b"", size + end)
            # The rest of this chunk may contain whole lines.
            last = chunk.rfind(b"\n") + 1
            if last > end:
                yield _Cut(chunk[end:last], 0)
            rest = [chunk[last:]]
    content = b"".join(rest)
    if content:
        yield _Cut(content, 0)


@dataclass(frozen=True)
class CompressedLines(FileSource):
    """A file of JSON lines, compressed as its suffix says."""

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Yield decompressed lines.

        Raises:
            UserError: the file is damaged or truncated.
            OSError: reading fails.
        """
        with open(self.path, "rb") as file, _decompressed(file, self.path) as stream:
            before = 0
            try:
                for cut in _cut_lines(stream, reading.max_bytes):
                    share, before = file.tell() - before, file.tell()
                    yield cut.block(share)
            except (EOFError, OSError, zlib.error, _zstd_error()) as error:
                # Errors of the operating system have a number, those of decompressors do not.
                if isinstance(error, OSError) and error.errno:
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                compression = COMPRESSIONS[self.path.suffix.lower()]
                raise WrongInputError(
                    f"{self.path}: damaged, or not {compression} ({error}), near byte {file.tell():,} of "
                    f"{self.total_bytes:,}"
                ) from None


def _decompressed(file: BinaryIO, path: Path) -> AbstractContextManager[Any]:
    return gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else zstd_module().ZstdFile(file)


def zstd_module() -> Any:
    """Import the standard library's module or its backport; raises ImportError if neither is installed."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _zstd_error() -> type[Exception]:
    try:
        error: type[Exception] = zstd_module().ZstdError
    except ImportError:
        return EOFError
    return error


@dataclass(frozen=True)
class StandardInput:
    """JSON lines from standard input."""

    name = "-"
    total_bytes = None
    can_be_read_again = False

    def identity(self) -> dict[str, Any]:
        """Nothing distinguishes one standard input from another, so an interrupted run is not resumed."""
        return {"input": "-"}

    def place(self, number: int) -> str:
        """Return `<stdin>:line`."""
        return f"<stdin>:{number + 1}"

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Yield lines as they arrive."""
        return (cut.block(0) for cut in _cut_lines(sys.stdin.buffer, reading.max_bytes))
