"""Parquet files: one block per row group; large row groups are divided."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_ladder.data.reading.protocol import (
    GROUP_BYTES,
    Block,
    FileShard,
    FileSource,
    Parsed,
    Reading,
    Shard,
    parsed_records,
    reason_against,
)
from megatron_ladder.errors import UserError, raise_user_errors

_BATCH_ROWS = 1024
"""Rows that are decoded at once, at most."""

_BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read at once; without a limit pyarrow reads the column of a whole row group."""

_OPEN_ROW_GROUPS = 8
"""Row groups that a process keeps open, so that it can continue with their next rows."""


@dataclass(frozen=True)
class _InvalidValue:
    """Replaces a value that cannot be decoded."""

    reason: str


def parse_rows(columns: Sequence[Sequence[Any]], reading: Reading) -> Parsed:
    """Return the rows of a table that can be tokenized."""

    def reason(row: tuple[Any, ...]) -> str | None:
        invalid = next((value for value in row if isinstance(value, _InvalidValue)), None)
        return reason_against(row, reading) if invalid is None else invalid.reason

    rows = enumerate(zip(*columns, strict=True))
    return parsed_records(((number, reason(row) or row) for number, row in rows), reading)


def _values(batch: Any, key: str) -> list[Any]:
    if key not in batch.schema.names:
        return [None] * len(batch)
    column = batch.column(key)
    try:
        return list(column.to_pylist())
    except ValueError:  # Some cannot be converted, or are not UTF-8, so all are converted one by one.
        return [_value(scalar, key) for scalar in column]


def _value(scalar: Any, key: str) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return _InvalidValue(f"byte 0x{error.object[error.start]:02x} under {key!r} is not UTF-8 ({error.reason})")
    except ValueError as error:
        return _InvalidValue(f"the value under {key!r} cannot be read: {error}")


@dataclass(frozen=True)
class _RowGroupPart:
    """Some rows of a row group; `text_bytes` is the decompressed size of the columns that are read."""

    path: Path
    number: int
    rows: range
    rows_before: int
    """Rows of the file before this row group."""
    text_bytes: int
    file_bytes: int

    def read(self, reading: Reading) -> Parsed:
        """Read the columns; raises UserError if the file is damaged."""
        import pyarrow

        status = self.path.stat()
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        try:
            batches = _row_reader(self.path, version, self.number, reading.all_keys).take(self.rows)
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
                raise
            problem = f"{self.path}: row group {self.number}: damaged ({error})"
            raise UserError(f"{problem}: download the file again") from None
        columns = [[value for batch in batches for value in _values(batch, key)] for key in reading.all_keys]
        return parse_rows(columns, reading)

    def place(self, number: int) -> str:
        """Return the row, counted from 0 as in tables."""
        return f"{self.path}: row {self.rows_before + self.rows.start + number}"


class _RowReader:
    """Reads the rows of one row group in order, which can only be decoded from its beginning, and continues after them.

    Each worker that reads a part of a row group decodes all of it; tokenizing takes much longer than that.
    """

    def __init__(self, path: Path, version: tuple[int, ...], number: int, keys: tuple[str, ...]) -> None:
        """`version` changes with the content, so that a rewritten file gets another reader from the cache."""
        self._path, self._number, self._keys = path, number, keys
        self._batches: Iterator[Any] = iter(())
        self._next, self._left = -1, None

    def take(self, rows: range) -> list[Any]:
        """Return batches with these rows; raises the errors of pyarrow."""
        begin, self._next = self._next, -1  # An error leaves -1, and the next call starts again.
        if not 0 <= begin <= rows.start:
            self._batches, begin, self._left = self._read(), 0, None
        found = []
        while begin < rows.stop:
            batch = self._left or next(self._batches)
            skipped = min(rows.start - begin, len(batch)) if rows.start > begin else 0
            count = min(rows.stop - begin - skipped, len(batch) - skipped)
            found.append(batch.slice(skipped, count))
            self._left = batch.slice(skipped + count)
            begin += skipped + count
        self._next = begin
        return found

    def _read(self) -> Iterator[Any]:
        import pyarrow
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self._path, buffer_size=_BUFFER_BYTES) as file:
            rows = _rows_of_a_part(file.metadata.row_group(self._number), self._keys)
            yield from file.iter_batches(min(_BATCH_ROWS, rows), row_groups=[self._number], columns=list(self._keys))
        raise pyarrow.ArrowInvalid("it has fewer rows than its metadata says")


_row_reader = functools.lru_cache(maxsize=_OPEN_ROW_GROUPS)(_RowReader)


def _text_bytes(group: Any, keys: tuple[str, ...]) -> int:
    """Return the decompressed size of the columns in a row group; columns of a structure are called `key.name`."""
    columns = [group.column(place) for place in range(group.num_columns)]
    inside = tuple(f"{key}." for key in keys)
    read = [column for column in columns if column.path_in_schema in keys or column.path_in_schema.startswith(inside)]
    return sum(int(column.total_uncompressed_size) for column in read)


def _rows_of_a_part(group: Any, keys: tuple[str, ...]) -> int:
    """Return the number of rows with about GROUP_BYTES of text; all rows of a group less than twice that size."""
    size = _text_bytes(group, keys)
    return max(1, group.num_rows if size < 2 * GROUP_BYTES else -(-group.num_rows * GROUP_BYTES // size))


@dataclass(frozen=True)
class _RowGroups(FileShard):
    """A row group, or all of a file; its parts are the blocks."""

    parts: tuple[_RowGroupPart, ...]
    is_whole: bool

    @property
    def total_bytes(self) -> int:
        return super().total_bytes if self.is_whole else sum(part.file_bytes for part in self.parts)

    @property
    def label(self) -> str:
        if self.is_whole:
            return super().label
        several = f" {len(self.parts)}" if len(self.parts) > 1 else ""
        return f"{self.path.name} {self.parts[0].number} {self.total_bytes}{several}"

    def blocks(self, reading: Reading, first: int = 0) -> Iterator[Block]:
        return iter(self.parts[first:])


@dataclass(frozen=True)
class ParquetFile(FileSource):
    """A Parquet file with a column for each key."""

    def check(self, reading: Reading) -> None:
        """Raise UserError if the file cannot be read or lacks a column."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(f"{reading.input_flag} {self.path}: Parquet needs pyarrow: pip install pyarrow") from None
        try:
            names = pyarrow.parquet.read_schema(self.path).names
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise UserError(f"{reading.input_flag} {self.path}: not a Parquet file ({error})") from None
        check_columns(str(self.path), names, reading)

    def shards(self, reading: Reading, part_bytes: int | None) -> Iterator[Shard]:
        parts = self._parts(reading)
        if part_bytes is None:
            yield _RowGroups(self.path, tuple(parts), is_whole=True)
        else:
            for _, group in groupby(parts, key=attrgetter("number")):
                yield _RowGroups(self.path, tuple(group), is_whole=False)

    def _parts(self, reading: Reading) -> Iterator[_RowGroupPart]:
        """Yield row groups, and parts of about GROUP_BYTES of larger row groups."""
        import pyarrow.parquet

        metadata = pyarrow.parquet.read_metadata(self.path)
        rows_before = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            rows, step = group.num_rows, _rows_of_a_part(group, reading.keys)
            text_bytes = _text_bytes(group, reading.keys)
            file_bytes = sum(group.column(place).total_compressed_size for place in range(group.num_columns))
            for begin in range(0, max(rows, 1), step):
                end = min(begin + step, rows)
                # Shares that add up to the whole.
                text, share = (
                    size * end // max(rows, 1) - size * begin // max(rows, 1) for size in (text_bytes, file_bytes)
                )
                yield _RowGroupPart(self.path, number, range(begin, end), rows_before, text, share)
            rows_before += rows


def check_columns(name: str, found: Sequence[str], reading: Reading) -> None:
    """Raise UserError if a table lacks a column that is read."""
    missing = [key for key in reading.keys if key not in found]
    if missing:
        raise UserError(
            f"{reading.input_flag} {name}: no column {', '.join(missing)} (columns found: {', '.join(found)}): "
            f"{reading.fix('column', found)}"
        )
    raise_user_errors(
        f"{reading.input_flag} {name}: has {found.count(key)} columns {key}: rename or remove all but one"
        for key in reading.keys
        if found.count(key) > 1
    )
