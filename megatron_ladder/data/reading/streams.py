"""JSON lines that can only be read from their beginning: compressed files, and standard input."""

import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_ladder.data.reading.files import HugeLine, file_identity
from megatron_ladder.data.reading.formats import BYTE_ORDER_MARK, COMPRESSIONS
from megatron_ladder.data.reading.json_lines import parse_lines
from megatron_ladder.data.reading.protocol import SPAN_BYTES, Block, Parsed, Reading, WrongInputError


@dataclass(frozen=True)
class Lines:
    """Whole lines."""

    content: bytes
    file_bytes: int
    """Bytes of the compressed file that were read for them."""

    @property
    def text_bytes(self) -> int:
        """Bytes of the lines."""
        return len(self.content)

    def read(self, reading: Reading) -> Parsed:
        """Parses the lines."""
        return parse_lines(self.content, reading)


class _Cut(NamedTuple):
    content: bytes
    """Whole lines; nothing where a line is passed over."""
    passed_over: int
    """Size of a line that is too large, else 0."""


def cut_lines(stream: BinaryIO, most_bytes: int) -> Iterator[_Cut]:
    """Whole lines of a stream, about SPAN_BYTES at a time; larger lines than `most_bytes` are not held."""
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
        if size > most_bytes:
            while (chunk := stream.read(SPAN_BYTES)) and b"\n" not in chunk:
                size += len(chunk)
            end = chunk.find(b"\n") + 1
            yield _Cut(b"", size + end)
            # What follows in this chunk may hold whole lines; the next cut is made behind them.
            last = chunk.rfind(b"\n") + 1
            if last > end:
                yield _Cut(chunk[end:last], 0)
            rest = [chunk[last:]]
    content = b"".join(rest)
    if content:
        yield _Cut(content, 0)


@dataclass(frozen=True)
class CompressedLines:
    """A file of JSON lines, compressed as its suffix says."""

    path: Path
    can_be_read_again = True

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def total_bytes(self) -> int:
        """Size of the compressed file."""
        return self.path.stat().st_size

    def identity(self) -> dict[str, Any]:
        """Size and time of the last change."""
        return file_identity(self.path)

    def place(self, number: int) -> str:
        """`file:line`."""
        return f"{self.path}:{number + 1}"

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Decompressed lines.

        Raises:
            UserError: the file is damaged, or cut off.
            OSError: it cannot be read on.
        """
        with open(self.path, "rb") as file, _decompressed(file, self.path) as stream:
            before = 0
            try:
                for cut in cut_lines(stream, reading.most_bytes):
                    share, before = file.tell() - before, file.tell()
                    yield HugeLine(cut.passed_over, share) if cut.passed_over else Lines(cut.content, share)
            except (EOFError, OSError, zlib.error, _zstd_error()) as error:
                # What the system reports has a number, what decompressors object to has none.
                if isinstance(error, OSError) and error.errno:
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                what = COMPRESSIONS[self.path.suffix.lower()]
                raise WrongInputError(
                    f"{self.path}: damaged, or not {what} ({error}), near byte {file.tell():,} of {self.total_bytes:,}"
                ) from None


def _decompressed(file: BinaryIO, path: Path) -> AbstractContextManager[Any]:
    return gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else zstd_module().ZstdFile(file)


def zstd_module() -> Any:
    """The standard library's module, or its backport; ImportError if there is neither."""
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
        """Nothing tells one input from another, so an interrupted run is not resumed."""
        return {"input": "-"}

    def place(self, number: int) -> str:
        """`<stdin>:line`."""
        return f"<stdin>:{number + 1}"

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Lines as they come."""
        for cut in cut_lines(sys.stdin.buffer, reading.most_bytes):
            yield HugeLine(cut.passed_over, 0) if cut.passed_over else Lines(cut.content, 0)
