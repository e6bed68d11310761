"""What is read: an input consists of sources, a source is cut into shards, a shard into blocks, a block holds records.

Shards can be read concurrently. One process reads the files and cuts blocks, and many processes decode them. A shard
always gives the same blocks.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_ladder.errors import Problem, raise_user_errors

_CHAT_HINT = "read conversations with `tools/preprocess_data.py --chat`"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHOWN_BAD = 3
"""Bad records that the error about too many of them lists, if they are close to each other."""
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonlines", ".jl")
SPAN_BYTES = 1 << 20
"""Approximate size of one read. The order of streamed samples depends on it."""
GROUP_BYTES = 4 << 20
"""Approximate amount of text that is tokenized at once, and of a part of a large Parquet row group. The order of
streamed samples depends on it."""


@dataclass(frozen=True)
class Reading:
    """What is read of every record, which errors are tolerated, and the fields that problems name."""

    keys: tuple[str, ...] = ("text",)
    """Keys of a JSON object, or columns of a table."""
    texts_only: bool = True
    """Whether values must be texts; otherwise whole records of any JSON values are read, and plain text cannot be."""
    max_bytes: int = 64 << 20
    """Size limit of a line, or of a file of plain text."""
    max_bad: int = 0
    """Number of unreadable records that may be skipped."""
    input_field: str = "input"
    keys_field: str = "json_keys"
    size_field: str | None = "max_document_megabytes"
    """Field of `max_bytes`; None if the limit is fixed."""
    optional_keys: tuple[str, ...] = ()
    """Keys that are read, too, where a record has them."""

    @property
    def all_keys(self) -> tuple[str, ...]:
        """The keys of the values that are read, in order."""
        return (*self.keys, *self.optional_keys)

    def problem(self, word: object, reason: str, fix: str = "", **texts: object) -> Problem:
        """Return a problem of one of the inputs; the templates are those of a problem."""
        return Problem({self.input_field: word}, f"{{}}: {reason}", fix, **texts)

    def fix(self, kind: str, names: Container[str]) -> str:
        """Return the template of what helps if a key, or a column, is not among those that were found."""
        is_chat = self.texts_only and "messages" in names
        return f"name the {kind} with {{{self.keys_field}}}{f', or {_CHAT_HINT}' if is_chat else ''}"


class Record(NamedTuple):
    """A record that is read whole."""

    values: dict[str, Any]
    """The values of the keys that are read and present."""
    unread: tuple[str, ...]
    """Its other keys."""
    is_row: bool
    """Whether it is the row of a table, in which every object has the keys of all, and null where a key is absent."""


class BadRecord(NamedTuple):
    """A record that cannot be read: its line or row in the block, from 0, and the reason, after its location."""

    number: int
    reason: str


class Parsed(NamedTuple):
    """The content of a block."""

    records: list[Any]
    """The readable records: their values, or what was prepared from these."""
    bad: list[BadRecord]
    """In order. Reading ends after `max_bad` + SHOWN_BAD of them."""


@dataclass(frozen=True)
class Block(ABC):
    """Some records of a shard, with their content, which another process can decode."""

    reading: Reading
    name: str
    """The file."""
    content: Any
    begin: int
    """Place of the content: its first byte or row in the text or table."""
    file_bytes: int
    """The block's share of `Shard.total_bytes`."""

    @property
    @abstractmethod
    def text_bytes(self) -> int:
        """Approximate size of its text, by which blocks are grouped."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Sequence[Any] | str]]:
        """Yield the number of each record, and the values of the keys, a `Record`, or why it cannot be read."""

    @abstractmethod
    def place(self, number: int) -> str:
        """Return the location of record `number` of the block: `file:line` for a file of lines."""

    def read(self, prepare: Callable[[Any], Any] = list) -> Parsed:
        """Decode all records; `prepare` converts each, or returns a text with the reason against it."""
        records = list[Any]()
        bad = list[BadRecord]()
        for number, row in self.rows():
            record: Any = row
            if not isinstance(row, str):
                record = _reason_against(row, self.reading) or prepare(row)
            if not isinstance(record, str):
                records.append(record)
                continue
            bad.append(BadRecord(number, f"{self.place(number)}: {record}"))
            if len(bad) == self.reading.max_bad + SHOWN_BAD:
                break
        return Parsed(records, bad)


class Shard(Protocol):
    """A part of a source that is read in order."""

    @property
    def label(self) -> str:
        """A name that distinguishes it from other and from changed shards, without its directory."""

    @property
    def total_bytes(self) -> int | None:
        """Size of the part of the file that the shard reads; None if unknown."""

    def identity(self) -> list[Any] | None:
        """Return values that distinguish it from a changed one, JSON-able; None if it can be read only once."""

    def blocks(self, first: int = 0) -> Iterator[Block]:
        """Yield its blocks of about SPAN_BYTES in order, which are always the same, without the first ones."""


class Source(Protocol):
    """An input that the user named."""

    @property
    def name(self) -> str:
        """The name that the user gave, or the file's path."""

    @property
    def total_bytes(self) -> int | None:
        """Size of the file; None if unknown."""

    def shards(self, part_bytes: int | None) -> Iterator[Shard]:
        """Cut it: ranges of about `part_bytes` of an uncompressed file, row groups. None: files stay whole."""


@dataclass(frozen=True)
class LocalFile:
    """What local files and parts of them share. A file that is not cut is a source and its only shard."""

    path: Path
    reading: Reading

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def total_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def label(self) -> str:
        return f"{self.path.name} {self.total_bytes}"

    def identity(self) -> list[Any] | None:
        """Return the path, the time of its last change, and the label."""
        return [str(self.path), self.path.stat().st_mtime_ns, self.label]

    def shards(self, part_bytes: int | None) -> Iterator[Any]:
        yield self


@dataclass(frozen=True)
class Rows(Block):
    """Some rows of a table; `begin` is the number of the first one."""

    columns: tuple[str, ...]
    """Names of all columns of the table."""

    @functools.cached_property
    def text_bytes(self) -> int:
        return sum(len(str(value)) for row in self.content for value in row)

    def rows(self) -> Iterator[tuple[int, Sequence[Any] | str]]:
        reading = self.reading
        if reading.texts_only:
            return enumerate(self.content)
        keys = [key for key in reading.all_keys if key in self.columns]
        unread = tuple(name for name in self.columns if name not in keys)
        records = (Record(dict(zip(keys, row, strict=True)), unread, True) for row in self.content)
        return enumerate(records)

    def place(self, number: int) -> str:
        """Return the row, counted from 0 as in tables."""
        return f"{self.name}: row {self.begin + number}"


def read_records(sources: Sequence[Source]) -> Iterator[list[Any]]:
    """Yield the values of all records in order; raises UserError for one that cannot be read."""
    for shard in (shard for source in sources for shard in source.shards(None)):
        for block in shard.blocks():
            records, bad = block.read()
            raise_user_errors(record.reason for record in bad)
            yield from records


def too_large(reading: Reading) -> str:
    """Return the reason why a document is not read."""
    fix = "" if reading.size_field is None else f"raise {{{reading.size_field}}}"
    return str(Problem({}, f"larger than {reading.max_bytes >> 20} megabytes", fix))


def _reason_against(row: Sequence[Any], reading: Reading) -> str | None:
    """Return why the values of a record cannot be tokenized; None if they can."""
    for key, value in row.values.items() if isinstance(row, Record) else zip(reading.keys, row, strict=True):
        if isinstance(value, ValueError):
            return f"the value under {key!r} cannot be read: {value}"
        if not reading.texts_only:
            continue
        if not isinstance(value, str):
            fix = f": {_CHAT_HINT}" if isinstance(value, list) else ""
            return f"expected a text under {key!r}, found {type(value).__name__}{fix}"
        try:
            size = len(value) if value.isascii() else len(value.encode())
        except UnicodeEncodeError as error:
            return f"\\u{ord(value[error.start]):04x} under {key!r} is half of a surrogate pair"
        if size > reading.max_bytes:
            return too_large(reading)
    return None


def is_json_lines(path: Path) -> bool:
    """Return whether a file contains JSON lines, judged by its suffix; compressed files do not count."""
    return path.suffix.lower() in JSON_SUFFIXES
