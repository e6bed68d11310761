"""Files that can be entered anywhere: JSON lines in spans of whole lines, and plain text, a document a file."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ladder.data.reading.formats import BYTE_ORDER_MARK
from megatron_ladder.data.reading.json_lines import parse_lines
from megatron_ladder.data.reading.protocol import SPAN_BYTES, BadRecord, Block, Parsed, Reading, too_large


def file_identity(path: Path) -> dict[str, Any]:
    """Size and time of a file's last change."""
    status = path.stat()
    return {"input": str(path), "bytes": status.st_size, "changed": status.st_mtime_ns}


@dataclass(frozen=True)
class LineSpan:
    """Bytes begin .. end - 1 of a file: whole lines."""

    path: Path
    begin: int
    end: int

    @property
    def text_bytes(self) -> int:
        """Bytes of the span."""
        return self.end - self.begin

    file_bytes = text_bytes

    def read(self, reading: Reading) -> Parsed:
        """Parses the lines."""
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            content = file.read(self.end - self.begin)
        return parse_lines(content.removeprefix(BYTE_ORDER_MARK) if self.begin == 0 else content, reading)


@dataclass(frozen=True)
class HugeLine:
    """One line that is too large to be read; it was passed over."""

    size: int
    """Bytes, those of the line feed included."""
    file_bytes: int
    """Its share of the file."""

    @property
    def text_bytes(self) -> int:
        """As the size."""
        return self.size

    def read(self, reading: Reading) -> Parsed:
        """Nothing but the reason."""
        return Parsed(tuple([] for _ in reading.keys), 1, (BadRecord(0, too_large(self.size, reading)),))


@dataclass(frozen=True)
class JsonLinesFile:
    """A file of JSON lines."""

    path: Path
    can_be_read_again = True

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    def identity(self) -> dict[str, Any]:
        """Size and time of the last change."""
        return file_identity(self.path)

    def place(self, number: int) -> str:
        """`file:line`."""
        return f"{self.path}:{number + 1}"

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Spans that end at line ends, without reading what lies between."""
        size = self.total_bytes
        with open(self.path, "rb") as file:
            begin = 0
            while begin < size:
                file.seek(min(begin + SPAN_BYTES, size))
                if len(file.readline(reading.most_bytes + 1)) <= reading.most_bytes:
                    end = file.tell()
                    yield LineSpan(self.path, begin, end)
                else:
                    file.seek(begin)
                    start = begin + file.read(SPAN_BYTES).rfind(b"\n") + 1
                    if start > begin:
                        yield LineSpan(self.path, begin, start)
                    end = end_of_line(file, start)
                    yield HugeLine(end - start, end - start)
                begin = end


def end_of_line(file: BinaryIO, start: int, limit: float = math.inf) -> int:
    """Where the line ends that goes on at `start`, its line feed included. No more than a piece of it is held.

    Args:
        limit: where it is enough to know that the line does not end before; some place from there on is told then.
    """
    file.seek(start)
    while (piece := file.readline(SPAN_BYTES)) and not piece.endswith(b"\n") and file.tell() < limit:
        pass
    return file.tell()


@dataclass(frozen=True)
class PlainFile:
    """A file of plain text, which is one document: the source, and its only block."""

    path: Path
    size: int
    can_be_read_again = True

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return self.size

    text_bytes = total_bytes
    file_bytes = total_bytes

    def identity(self) -> dict[str, Any]:
        """Size and time of the last change."""
        return file_identity(self.path)

    def place(self, number: int) -> str:
        """`file:line`."""
        return f"{self.path}:{number + 1}"

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Itself."""
        yield self

    def read(self, reading: Reading) -> Parsed:
        """The text, as it is but for a byte order mark."""
        if self.size > reading.most_bytes:
            return Parsed(([],), 0, (BadRecord(0, too_large(self.size, reading)),))
        content = self.path.read_bytes().removeprefix(BYTE_ORDER_MARK)
        try:
            return Parsed(([content.decode()],), 0)
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start)
            reason = f"byte 0x{content[error.start]:02x} is not UTF-8 ({error.reason})"
            return Parsed(([],), 0, (BadRecord(line, reason),))
