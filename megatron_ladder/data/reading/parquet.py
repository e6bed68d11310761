"""Parquet files: one block per row group; large row groups are divided."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ladder.data.reading.protocol import GROUP_BYTES, Block, LocalFile, Reading, Rows, Shard
from megatron_ladder.errors import UserError

_BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read at once; without a limit pyarrow reads the column of a whole row group."""


@dataclass(frozen=True)
class ParquetFile(LocalFile):
    """A Parquet file with a column for each key, or one of its row groups."""

    row_group: int | None = None
    group_bytes: int = 0
    parts: int = 1
    """Blocks of the row group."""

    @property
    def total_bytes(self) -> int:
        return super().total_bytes if self.row_group is None else self.group_bytes

    @property
    def label(self) -> str:
        if self.row_group is None:
            return super().label
        return f"{self.path.name} {self.row_group} {self.group_bytes}" + (f" {self.parts}" if self.parts > 1 else "")

    def check(self) -> None:
        """Raise UserError if the file cannot be read or lacks a column."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(self.reading.problem(self.path, "Parquet needs pyarrow", "pip install pyarrow")) from None
        try:
            names = pyarrow.parquet.read_schema(self.path).names
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise UserError(self.reading.problem(self.path, "not a Parquet file ({error})", error=error)) from None
        check_columns(self.name, names, self.reading)

    def shards(self, part_bytes: int | None) -> Iterator[Shard]:
        import pyarrow.parquet

        if part_bytes is None:
            yield self
            return
        metadata = pyarrow.parquet.read_metadata(self.path)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            yield replace(self, row_group=number, group_bytes=_file_bytes(group), parts=len(self._begins(group)))

    def _begins(self, group: Any) -> range:
        """Return the first row of each part of a row group with about GROUP_BYTES of text, or more in a single part."""
        columns = [group.column(number) for number in range(group.num_columns)]
        # Columns of a structure are called `key.name`.
        keys = tuple(f"{key}." for key in self.reading.keys)
        read = [column for column in columns if f"{column.path_in_schema}.".startswith(keys)]
        size = sum(int(column.total_uncompressed_size) for column in read)
        step = group.num_rows if size < 2 * GROUP_BYTES else -(-group.num_rows * GROUP_BYTES // size)
        return range(0, group.num_rows, max(1, step))

    def blocks(self, first: int = 0) -> Iterator[Block]:
        """Yield rows; raises UserError if the file is damaged. Row groups before the first block are not read."""
        import pyarrow
        import pyarrow.parquet

        rows_before = 0
        with pyarrow.parquet.ParquetFile(self.path, buffer_size=_BUFFER_BYTES) as file:
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                parts = len(self._begins(group))
                if self.row_group in (None, number):
                    try:
                        if first < parts:
                            yield from self._parts(file, number, first, rows_before)
                    except (pyarrow.ArrowException, OSError) as error:
                        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
                            raise
                        problem = f"{self.path}: row group {number}: damaged ({error})"
                        raise UserError(f"{problem}: download the file again") from None
                    first = max(0, first - parts)
                rows_before += group.num_rows

    def _parts(self, file: Any, number: int, first: int, rows_before: int) -> Iterator[Rows]:
        """Yield the parts of a row group, which can only be decoded from its beginning."""
        group = file.metadata.row_group(number)
        count = group.num_rows
        size = _file_bytes(group)
        columns = tuple(file.schema_arrow.names)
        keys = [key for key in self.reading.all_keys if key in columns]
        begins = self._begins(group)
        batches = file.iter_batches(begins.step, row_groups=[number], columns=keys)
        rows = itertools.chain.from_iterable(_rows_of(batch, keys) for batch in batches)
        for part, begin in enumerate(begins):
            taken = list(itertools.islice(rows, begins.step))
            end = min(begin + begins.step, count)
            if part >= first:
                # Shares that add up to the whole.
                share = size * end // count - size * begin // count
                yield Rows(self.reading, self.name, taken, rows_before + begin, share, columns)


def _rows_of(batch: Any, keys: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(_values(batch.column(key)) for key in keys), strict=True)


def _values(column: Any) -> list[Any]:
    """Return the values of a column, with an error instead of each one that cannot be read."""

    def value(scalar: Any) -> Any:
        try:
            return scalar.as_py()
        except ValueError as error:
            return error

    try:
        return list(column.to_pylist())
    except ValueError:
        return list(map(value, column))


def _file_bytes(group: Any) -> int:
    return sum(group.column(number).total_compressed_size for number in range(group.num_columns))


def check_columns(name: str, columns: Sequence[str], reading: Reading) -> None:
    """Raise UserError if a table lacks a column that is read."""
    missing = [key for key in reading.keys if key not in columns]
    if missing:
        reason = "no column {missing} (columns found: {columns})"
        texts = {"missing": ", ".join(missing), "columns": ", ".join(columns)}
        raise UserError(reading.problem(name, reason, reading.fix("column", columns), **texts))
    if repeated := [key for key in reading.all_keys if columns.count(key) > 1]:
        reason = "column {column} occurs twice"
        raise UserError(reading.problem(name, reason, "rename one of them", column=repeated[0]))
