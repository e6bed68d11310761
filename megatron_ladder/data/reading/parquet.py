"""Parquet files: one block per row group; large row groups are divided."""

import functools
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ladder.data.reading.protocol import (
    GROUP_BYTES,
    Block,
    FileSource,
    Parsed,
    Reading,
    WrongInputError,
    parsed_records,
    reason_against,
    too_large,
)
from megatron_ladder.errors import UserError

_BATCH_ROWS = 1024
"""Rows that are decoded at once, at most."""

_BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read at once; without a limit pyarrow reads the column of a whole row group."""

_OPEN_ROW_GROUPS = 8
"""Row groups that a process keeps open, so that it can continue with their next rows."""


class _InvalidText(str):
    """Replaces a value that cannot be decoded; its text is the reason."""


def check_rows(columns: tuple[list[Any], ...], reading: Reading) -> Parsed:
    """Remove the rows of a table that contain no text."""
    rows = enumerate(zip(*columns, strict=True))
    return parsed_records(((number, _reason(row, reading) or row) for number, row in rows), len(columns[0]), reading)


def _reason(row: tuple[Any, ...], reading: Reading) -> str | None:
    for key, value in zip(reading.keys, row, strict=True):
        if isinstance(value, _InvalidText):
            return str(value)
        if not reading.texts_only:
            continue
        # A character has at most 4 bytes, so that only long texts are encoded.
        if isinstance(value, str) and 4 * len(value) > reading.max_bytes:
            size = len(value.encode(errors="replace"))
            if size > reading.max_bytes:
                return too_large(size, reading)
        reason = reason_against(key, value)
        if reason is not None:
            return reason
    return None


def _value(scalar: Any, key: str) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return _InvalidText(f"byte 0x{error.object[error.start]:02x} under {key!r} is not UTF-8 ({error.reason})")


@dataclass(frozen=True)
class RowGroup:
    """Some rows of a row group; `text_bytes` is the decompressed size of the columns that are read."""

    path: Path
    number: int
    text_bytes: int
    file_bytes: int
    rows: range

    def beginning(self, text_bytes: int) -> "RowGroup":
        """Return its first rows, with about `text_bytes` of text."""
        count = max(1, len(self.rows) * text_bytes // max(self.text_bytes, 1))
        return self if count >= len(self.rows) else replace(self, text_bytes=text_bytes, rows=self.rows[:count])

    def read(self, reading: Reading) -> Parsed:
        """Read the columns; raises UserError if the file is damaged."""
        import pyarrow

        status = self.path.stat()
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        columns: tuple[list[Any], ...] = tuple([] for _ in reading.keys)
        try:
            for batch in _row_iterator(self.path, version, self.number, reading.keys).take(self.rows):
                for column, key in zip(columns, reading.keys, strict=True):
                    values = batch.column(key)
                    try:
                        column += values.to_pylist()
                    except UnicodeDecodeError:  # Some are not UTF-8, so all are converted one by one.
                        column += [_value(scalar, key) for scalar in values]
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
                raise
            problem = f"{self.path}: row group {self.number}: damaged ({error})"
            raise WrongInputError(f"{problem}: download the file again") from None
        return check_rows(columns, reading)


class _RowIterator:
    """Reads the rows of one row group in order, which can only be decoded from its beginning, and continues after them.

    Each worker that reads a part of a row group decodes all of it; tokenizing takes much longer than that.
    """

    def __init__(self, path: Path, version: tuple[int, ...], number: int, keys: tuple[str, ...]) -> None:
        """`version` changes with the content, so that a rewritten file gets another iterator from the cache."""
        self._path, self._number, self._keys = path, number, keys
        self._lock = threading.Lock()
        self._batches: Generator[Any, None, None] | None = None
        self._next = 0
        self._left: Any = None

    def take(self, rows: range) -> list[Any]:
        """Return batches with these rows; raises the errors of pyarrow."""
        with self._lock:
            try:
                return self._take(rows)
            except BaseException:
                self._batches = None
                raise

    def _take(self, rows: range) -> list[Any]:
        if self._batches is None or rows.start < self._next:
            self._batches, self._next, self._left = self._read(), 0, None
        found = []
        while self._next < rows.stop:
            while not self._left:
                self._left = next(self._batches)
            missing = rows.start - self._next
            count = min(missing if missing > 0 else rows.stop - self._next, len(self._left))
            if missing <= 0:
                found.append(self._left.slice(0, count))
            self._left = self._left.slice(count) if count < len(self._left) else None
            self._next += count
        return found

    def _read(self) -> Generator[Any, None, None]:
        import pyarrow
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self._path, buffer_size=_BUFFER_BYTES) as file:
            at_once = min(_BATCH_ROWS, _rows_of_a_part(file.metadata.row_group(self._number), self._keys))
            yield from file.iter_batches(at_once, row_groups=[self._number], columns=list(self._keys))
        raise pyarrow.ArrowInvalid("it has fewer rows than its metadata says")


_row_iterator = functools.lru_cache(maxsize=_OPEN_ROW_GROUPS)(_RowIterator)


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
class ParquetFile(FileSource):
    """A Parquet file with a column for each key."""

    def place(self, number: int) -> str:
        """Return the row, counted from 0 as in tables."""
        return f"{self.path}: row {number}"

    def check(self, reading: Reading) -> None:
        """Raise UserError if the file cannot be read or lacks a column."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(f"--input {self.path}: Parquet needs pyarrow: pip install pyarrow") from None
        try:
            names = pyarrow.parquet.read_schema(self.path).names
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise UserError(f"--input {self.path}: not a Parquet file ({error})") from None
        missing = [key for key in reading.keys if key not in names]
        if missing:
            raise UserError(missing_columns(str(self.path), missing, names))

    def blocks(self, reading: Reading) -> Iterator[Block]:
        return self.row_groups(reading)

    def row_groups(self, reading: Reading) -> Iterator[RowGroup]:
        """Yield row groups, and parts of about GROUP_BYTES of larger row groups."""
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self.path) as file:
            metadata = file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        for number, group in enumerate(groups):
            rows, step = group.num_rows, _rows_of_a_part(group, reading.keys)
            text_bytes = _text_bytes(group, reading.keys)
            file_bytes = sum(group.column(place).total_compressed_size for place in range(group.num_columns))
            for begin in range(0, max(rows, 1), step):
                end = min(begin + step, rows)
                # Shares that add up to the whole.
                text, share = (
                    size * end // max(rows, 1) - size * begin // max(rows, 1) for size in (text_bytes, file_bytes)
                )
                yield RowGroup(self.path, number, text, share, range(begin, end))


def missing_columns(name: str, missing: list[str], found: list[str]) -> str:
    """Return the message about columns that a table lacks."""
    return (
        f"--input {name}: no column {', '.join(missing)} (columns found: {', '.join(found)}): "
        "name the text's column with --json-keys"
    )
