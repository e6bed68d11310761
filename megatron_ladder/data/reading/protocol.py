"""Sources of documents: a source is cut into blocks, each of which can be read separately.

One process cuts blocks and many processes read them. A source gives the same blocks each time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_ladder.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")

SPAN_BYTES = 1 << 20
"""Approximate size of one read; what is parsed should still be in the processor's cache."""

GROUP_BYTES = 4 << 20
"""Approximate amount of text that is tokenized at once. Parsing evicts a library's words from the processor's cache,
so the two should not alternate too often; larger groups would need more memory and delay progress reports."""


class WrongInputError(UserError):
    """The content of the input is wrong, so reading it again would fail again."""


@dataclass(frozen=True)
class Reading:
    """What is read of every record, and which errors are tolerated."""

    keys: tuple[str, ...] = ("text",)
    """Keys of a JSON object, or columns of a table."""
    texts_only: bool = True
    """Whether values must be texts; otherwise any JSON value is accepted, and plain text cannot be read."""
    max_bytes: int = 64 << 20
    """Size limit of a line, or of a file of plain text."""
    max_bad: int = 0
    """Number of unreadable records that may be skipped."""


class BadRecord(NamedTuple):
    """A record that cannot be read: its line or row in the block, from 0, and the reason."""

    number: int
    reason: str


class Parsed(NamedTuple):
    """The content of a block."""

    columns: tuple[list[Any], ...]
    """For each key, the values of all readable records."""
    records: int
    """Lines or rows of the block, including those without a document; the next block continues the numbering."""
    bad: tuple[BadRecord, ...] = ()
    """In order. Reading ends after `max_bad` + 1 of them."""
    numbers: tuple[int, ...] | None = None
    """Record number of each value, counted as in BadRecord; None for 0, 1, 2 and so on."""


class Block(Protocol):
    """Some records of a source; small, so that it can be sent to another process."""

    @property
    def text_bytes(self) -> int:
        """Approximate size of its text, by which blocks are grouped."""

    @property
    def file_bytes(self) -> int:
        """Its share of `Source.total_bytes`."""

    def read(self, reading: Reading) -> Parsed:
        """Read the values of the keys."""


class Source(Protocol):
    """An origin of documents."""

    @property
    def name(self) -> str:
        """The name that the user gave, or the file's path."""

    @property
    def total_bytes(self) -> int | None:
        """Size of the file; None if unknown."""

    @property
    def can_be_read_again(self) -> bool:
        """Whether `blocks` can be called twice and gives the same blocks."""

    def identity(self) -> dict[str, Any]:
        """Return values that distinguish this source from a changed one; JSON-able."""

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Yield the source in order, cut into blocks of about SPAN_BYTES."""

    def place(self, number: int) -> str:
        """Return where record `number`, counted from 0, is located: `file:line` for a file of lines."""


@dataclass(frozen=True)
class FileSource:
    """The part of `Source` that all local files share; records are lines. It is identified by its size and time."""

    path: Path
    can_be_read_again = True

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def total_bytes(self) -> int:
        return self.path.stat().st_size

    def identity(self) -> dict[str, Any]:
        status = self.path.stat()
        return {"input": str(self.path), "bytes": status.st_size, "changed": status.st_mtime_ns}

    def place(self, number: int) -> str:
        return f"{self.path}:{number + 1}"


def parsed_records(rows: Iterable[tuple[int, Sequence[Any] | str]], records: int, reading: Reading) -> Parsed:
    """Return the readable ones of `records` records; `rows` are numbers, and values or a reason against them."""
    columns: tuple[list[Any], ...] = tuple([] for _ in reading.keys)
    bad: list[BadRecord] = []
    numbers: list[int] = []
    for number, row in rows:
        if isinstance(row, str):
            bad.append(BadRecord(number, row))
            if len(bad) > reading.max_bad:
                break
            continue
        numbers.append(number)
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return Parsed(columns, records, tuple(bad), None if len(numbers) == records else tuple(numbers))


def too_large(size: int, reading: Reading) -> str:
    """Return the reason why a document is not read."""
    return (
        f"{size:,} bytes exceed the size limit of a document: raise --max-document-megabytes, "
        f"now {reading.max_bytes >> 20}"
    )


def reason_against(key: str, value: Any) -> str | None:
    """Return why a value is not a text that can be tokenized; None if it is one."""
    if not isinstance(value, str):
        return f"expected a text under {key!r}, found {type(value).__name__}"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(value[error.start]):04x} under {key!r} is half of a surrogate pair"
    return None


def is_json_lines(path: Path) -> bool:
    """Return whether a file contains JSON lines, judged by its suffix; compressed files do not count."""
    return path.suffix.lower() in JSON_SUFFIXES
