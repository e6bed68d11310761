"""Parquet files, a row group a block; large row groups are cut."""

import functools
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ladder.data.reading.files import file_identity
from megatron_ladder.data.reading.json_lines import reason_against
from megatron_ladder.data.reading.protocol import (
    GROUP_BYTES,
    BadRecord,
    Block,
    Parsed,
    Reading,
    WrongInputError,
    too_large,
)
from megatron_ladder.errors import UserError

BATCH_ROWS = 1024
"""Rows that are decoded at once, at most."""

BUFFER_BYTES = 1 << 20
"""Of a column that are read at once; without it a column of a row group is read whole."""

KEPT_OPEN = 8
"""Row groups whose next rows a process can go on with."""


class _NotUtf8(str):
    """Stands for a value that cannot be decoded; the text is the reason."""


def check_rows(columns: tuple[list[Any], ...], reading: Reading) -> Parsed:
    """Rows of a table, without those that hold no text."""
    kept: tuple[list[Any], ...] = tuple([] for _ in columns)
    bad: list[BadRecord] = []
    numbers: list[int] = []
    for number, row in enumerate(zip(*columns, strict=True)):
        reason = next((str(value) for value in row if isinstance(value, _NotUtf8)), None)
        if reason is None and reading.texts_only:
            reason = _reason(row, reading)
        if reason is not None:
            bad.append(BadRecord(number, reason))
            if len(bad) > reading.most_bad:
                break
            continue
        numbers.append(number)
        for column, value in zip(kept, row, strict=True):
            column.append(value)
    return Parsed(kept, len(columns[0]), tuple(bad), tuple(numbers) if bad else None)


def _reason(row: tuple[Any, ...], reading: Reading) -> str | None:
    for key, value in zip(reading.keys, row, strict=True):
        # Only a text of so many characters can have so many bytes.
        if isinstance(value, str) and 4 * len(value) > reading.most_bytes:
            size = len(value.encode(errors="replace"))
            if size > reading.most_bytes:
                return too_large(size, reading)
        reason = reason_against(key, value)
        if reason is not None:
            return reason
    return None


def _values(column: Any, key: str) -> list[Any]:
    """Those of an Arrow array; one by one where some are not UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(scalar, key) for scalar in column]


def _value(scalar: Any, key: str) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return _NotUtf8(f"byte 0x{error.object[error.start]:02x} under {key!r} is not UTF-8 ({error.reason})")


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file, or some rows of it."""

    path: Path
    number: int
    text_bytes: int
    """Of its wanted columns, decompressed."""
    file_bytes: int
    """Its share of the file."""
    rows: range
    """Of the row group."""

    def beginning(self, text_bytes: int) -> "RowGroup":
        """Its first rows, about so much of text."""
        count = max(1, len(self.rows) * text_bytes // max(self.text_bytes, 1))
        return self if count >= len(self.rows) else replace(self, text_bytes=text_bytes, rows=self.rows[:count])

    def read(self, reading: Reading) -> Parsed:
        """Reads the wanted columns.

        Raises:
            UserError: the file is damaged.
        """
        import pyarrow

        status = self.path.stat()
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        columns: tuple[list[Any], ...] = tuple([] for _ in reading.keys)
        try:
            for batch in _rows_in_order(self.path, version, self.number, reading.keys).take(self.rows):
                for column, key in zip(columns, reading.keys, strict=True):
                    column += _values(batch.column(key), key)
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
                raise
            what = f"{self.path}: row group {self.number}: damaged ({error})"
            raise WrongInputError(f"{what}: fetch the file anew") from None
        return check_rows(columns, reading)


@functools.lru_cache(maxsize=KEPT_OPEN)
def _rows_in_order(path: Path, version: tuple[int, ...], number: int, keys: tuple[str, ...]) -> "_RowsInOrder":
    """The one of this process; a file that was written anew has another."""
    return _RowsInOrder(path, number, keys)


class _RowsInOrder:
    """Rows of one row group, which can be entered at its beginning only: who asks for later rows goes on from there.

    Of several workers that read a row group in turns, each decodes all of it, which takes a small part of the time
    that tokenising takes.
    """

    def __init__(self, path: Path, number: int, keys: tuple[str, ...]) -> None:
        self._path, self._number, self._keys = path, number, keys
        self._lock = threading.Lock()
        self._batches: Generator[Any, None, None] | None = None
        self._next = 0
        self._left: Any = None

    def take(self, rows: range) -> list[Any]:
        """Batches that hold these rows; raises what pyarrow raises."""
        with self._lock:
            try:
                found = self._take(rows)
            except BaseException:
                self._batches = None
                raise
            return found

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

        with pyarrow.parquet.ParquetFile(self._path, buffer_size=BUFFER_BYTES) as file:
            at_once = min(BATCH_ROWS, _rows_of_a_part(file.metadata.row_group(self._number), self._keys))
            yield from file.iter_batches(at_once, row_groups=[self._number], columns=list(self._keys))
        raise pyarrow.ArrowInvalid("it holds fewer rows than it says")


def _text_bytes(group: Any, keys: tuple[str, ...]) -> int:
    """Of the wanted columns of a row group, decompressed; those of a structure are called `key.name`."""
    columns = [group.column(place) for place in range(group.num_columns)]
    inside = tuple(f"{key}." for key in keys)
    return sum(
        int(column.total_uncompressed_size)
        for column in columns
        if column.path_in_schema in keys or column.path_in_schema.startswith(inside)
    )


def _rows_of_a_part(group: Any, keys: tuple[str, ...]) -> int:
    """About GROUP_BYTES of text; all rows where there is not twice as much."""
    size = _text_bytes(group, keys)
    return max(1, group.num_rows if size < 2 * GROUP_BYTES else -(-group.num_rows * GROUP_BYTES // size))


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file with a column for each key."""

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
        """The row, counted from 0 as tables are."""
        return f"{self.path}: row {number}"

    def check(self, reading: Reading) -> None:
        """Raises UserError when the file cannot be read, or lacks a column."""
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
            raise UserError(
                f"--input {self.path}: no column {', '.join(missing)} (columns found: {', '.join(names)}): "
                "name the text's column by --json-keys"
            )

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """See `row_groups`."""
        return self.row_groups(reading)

    def row_groups(self, reading: Reading) -> Iterator[RowGroup]:
        """Row groups, and parts of about GROUP_BYTES of those that are larger."""
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
                # Shares that sum up to the whole.
                text, share = (
                    size * end // max(rows, 1) - size * begin // max(rows, 1) for size in (text_bytes, file_bytes)
                )
                yield RowGroup(self.path, number, text, share, range(begin, end))
