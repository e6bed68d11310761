"""The data path beside its targets: tokenising, sampling, indexing."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_ladder.data.files import write_atomically
from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import parse_command_line
from megatron_ladder.lab.bench.data_rows import DATA_ROWS
from megatron_ladder.lab.bench.data_table import DataBenchmark, DataResult, table
from megatron_ladder.lab.bench.paired import FEWEST_ROUNDS


@dataclass(frozen=True)
class DataBenchmarkOptions:
    """Data benchmark. Ways that are compared are interleaved, and their CPU seconds are counted."""

    rows: tuple[str, ...] = tuple(DATA_ROWS)
    """Rows of the table to measure."""
    rounds: int = 5
    """Rounds that count; every way runs once in each."""
    megabytes: int = 100
    """MB of text to tokenise, where a row does not say otherwise."""
    folder: Path | None = None
    """Where data is written while it is measured; the system's folder for temporary files if not given."""
    json: Path | None = None
    """File for the results: a list of rows."""


def parse_options(argv: Sequence[str]) -> DataBenchmarkOptions:
    """Reads the command line.

    Raises:
        UserError: a line for each mistake.
    """
    mistakes: list[str] = []
    options: DataBenchmarkOptions
    (options,) = parse_command_line(
        [DataBenchmarkOptions], argv, "benchmark_data.py", "The data path beside its targets.", found=mistakes
    )
    strange = [row for row in options.rows if row not in DATA_ROWS]
    if strange:
        mistakes.append(f"--rows {' '.join(strange)}: expected some of {', '.join(DATA_ROWS)}")
    if options.rounds < FEWEST_ROUNDS:
        mistakes.append(f"--rounds {options.rounds}: below {FEWEST_ROUNDS} there is no spread to judge by")
    if options.megabytes < 1:
        mistakes.append(f"--megabytes {options.megabytes}: expected 1 or more")
    if options.folder is not None and not options.folder.is_dir():
        mistakes.append(f"--folder {options.folder}: no such directory")
    if mistakes:
        raise UserError(*mistakes)
    return options


def main(argv: Sequence[str]) -> None:
    """Measures the rows that were asked for and prints a table."""
    options = parse_options(argv)
    results = [result for row in options.rows for result in _measure(row, options)]
    print("\n" + table(results))
    if options.json is not None:
        plain = [dataclasses.asdict(result) | {"met": result.met} for result in results]
        write_atomically(options.json, (json.dumps(plain, indent=1) + "\n").encode())


def _measure(row: str, options: DataBenchmarkOptions) -> Sequence[DataResult]:
    with tempfile.TemporaryDirectory(prefix="data-benchmark-", dir=options.folder) as folder:
        print(f"measuring {row}", flush=True)
        return DATA_ROWS[row](DataBenchmark(Path(folder), options.rounds, options.megabytes, _tell))


def _tell(line: str) -> None:
    print(f"    {line}", flush=True)


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
