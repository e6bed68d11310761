"""Parquet files, a row group a block."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.data.reading.files import file_identity
from megatron_ladder.data.reading.json_lines import reason_against
from megatron_ladder.data.reading.protocol import BadRecord, Block, Parsed, Reading, too_large
from megatron_ladder.errors import UserError

BATCH_ROWS = 1024
"""Rows that are decoded at once."""


def check_rows(columns: tuple[list[Any], ...], reading: Reading) -> Parsed:
    """Rows of a table, without those that hold no text."""
    kept: tuple[list[Any], ...] = tuple([] for _ in columns)
    bad: list[BadRecord] = []
    for number, row in enumerate(zip(*columns, strict=True)):
        reason = _reason(row, reading) if reading.texts_only else None
        if reason is not None:
            bad.append(BadRecord(number, reason))
            if len(bad) > reading.most_bad:
                break
            continue
        for column, value in zip(kept, row, strict=True):
            column.append(value)
    return Parsed(kept, len(columns[0]), tuple(bad))


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


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file."""

    path: Path
    number: int
    text_bytes: int
    """Of its wanted columns, decompressed."""
    file_bytes: int
    """Its share of the file."""

    def read(self, reading: Reading) -> Parsed:
        """Reads the wanted columns, some rows at a time."""
        import pyarrow.parquet

        columns: tuple[list[Any], ...] = tuple([] for _ in reading.keys)
        with pyarrow.parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[self.number], columns=list(reading.keys)):
                for column, key in zip(columns, reading.keys, strict=True):
                    column += batch.column(key).to_pylist()
        return check_rows(columns, reading)


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
            raise UserError(f"--input {self.path}: not a Parquet file ({error})") from None
        missing = [key for key in reading.keys if key not in names]
        if missing:
            raise UserError(
                f"--input {self.path}: no column {', '.join(missing)} (columns found: {', '.join(names)}): "
                "name the text's column by --json-keys"
            )

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """Row groups."""
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self.path) as file:
            metadata = file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        for number, group in enumerate(groups):
            columns = [group.column(place) for place in range(group.num_columns)]
            wanted = [column for column in columns if column.path_in_schema.split(".")[0] in reading.keys]
            yield RowGroup(
                self.path,
                number,
                sum(column.total_uncompressed_size for column in wanted),
                sum(column.total_compressed_size for column in columns),
            )
