"""Measures the data path (tokenizing, sampling, indexing) against its targets."""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.cli.programs import Command
from megatron_ladder.command_line import parse_config
from megatron_ladder.errors import run_program
from megatron_ladder.files import write_atomically
from megatron_ladder.flags import flag
from megatron_ladder.lab.bench.data_table import DataBenchmark, DataResult, DataRow, table
from megatron_ladder.lab.bench.options import FEWEST_ROUNDS

ROWS = ("tokenizers", "loop", "memory", "samples", "index", "megatron", "damage")


@dataclass(frozen=True)
class DataBenchmarkOptions:
    """Data benchmark. The compared variants run alternately, and their CPU seconds are counted."""

    rows: tuple[str, ...] = flag(ROWS, choices=ROWS)
    """Rows of the table to measure."""
    rounds: int = flag(5, minimum=FEWEST_ROUNDS)
    """Measured rounds; every variant runs once per round."""
    megabytes: int = flag(100, minimum=1)
    """MB of text to tokenize, unless a row has its own size."""
    folder: Path | None = None
    """Directory for the data of the measurements; the system's temporary directory by default."""
    json: Path | None = flag(None, output="file")
    """File for the results, as a list of rows."""


COMMANDS = (Command((DataBenchmarkOptions,)),)


def _find_errors(options: DataBenchmarkOptions) -> Iterator[str]:
    if options.folder is not None and not options.folder.is_dir():
        yield f"--folder {options.folder}: no such directory"


parse_options = functools.partial(
    parse_config, DataBenchmarkOptions, program="benchmark_data.py", description=__doc__, find_errors=_find_errors
)


def main(argv: Sequence[str]) -> None:
    """Measure the requested rows and print a table."""
    options = parse_options(argv)
    from megatron_ladder.lab.bench import data_samples, data_tokenizing

    measures: tuple[DataRow, ...] = (
        data_tokenizing.tokenizer_shares,
        data_tokenizing.loop_ratios,
        data_tokenizing.peak_memory,
        data_samples.read_samples,
        data_samples.time_orders,
        data_samples.compare_with_megatron,
        data_samples.detect_damage,
    )
    measure = dict(zip(ROWS, measures, strict=True))

    def report(line: str) -> None:
        print(f"    {line}", flush=True)

    results: list[DataResult] = []
    for row in options.rows:
        with tempfile.TemporaryDirectory(prefix="data-benchmark-", dir=options.folder) as folder:
            print(f"measuring {row}", flush=True)
            results += measure[row](DataBenchmark(Path(folder), options.rounds, options.megabytes, report))
    print("\n" + table(results))
    if options.json is not None:
        plain = [dataclasses.asdict(result) | {"met": result.met} for result in results]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.json, json.dumps(plain, indent=1) + "\n")


entry_point = functools.partial(run_program, main)
