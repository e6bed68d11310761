"""Indexed data sets merged into one."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_ladder.data.merge import find_inputs, merge_datasets
from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import parse_command_line


@dataclass(frozen=True)
class MergeConfig:
    """Input and output."""

    input: tuple[Path, ...]
    """Data sets to join, in this order: prefixes (of .bin and .idx), or folders, of which all data sets are taken by
    name."""
    output_prefix: Path
    """Path of the output without .bin and .idx."""


def parse_options(argv: Sequence[str]) -> MergeConfig:
    """Reads the command line.

    Raises:
        UserError: a line for each mistake.
    """
    config: MergeConfig
    (config,) = parse_command_line(
        [MergeConfig], argv, program="merge_datasets.py", description="Joins indexed data sets."
    )
    return config


def main(argv: Sequence[str]) -> None:
    """Reads the command line and does the work."""
    config = parse_options(argv)
    if not config.output_prefix.name or not config.output_prefix.parent.is_dir():
        raise UserError(f"--output-prefix {config.output_prefix}: expected a name in a folder that exists")
    prefixes = find_inputs(config.input)
    documents, tokens = merge_datasets(prefixes, config.output_prefix, functools.partial(print, flush=True))
    print(f"{config.output_prefix}: {documents:,} documents, {tokens:,} tokens, of {len(prefixes)} data sets")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
