"""Merges indexed data sets into one."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.cli.programs import Command
from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import parse_config


@dataclass(frozen=True)
class MergeConfig:
    """Input and output."""

    input: tuple[Path, ...]
    """Data sets to merge, in this order: prefixes (of .bin and .idx), or directories, whose data sets are merged in
    the order of their names."""
    output_prefix: Path
    """Path of the output without .bin and .idx."""


COMMANDS = (Command((MergeConfig,)),)


def _find_errors(config: MergeConfig) -> Iterator[str]:
    if not config.output_prefix.name:
        yield f"--output-prefix {config.output_prefix}: expected the prefix of a file name"


parse_options = functools.partial(
    parse_config, MergeConfig, program="merge_datasets.py", description=__doc__, find_errors=_find_errors
)


def main(argv: Sequence[str]) -> None:
    """Read the command line and merge."""
    config = parse_options(argv)
    from megatron_ladder.data.merge import find_inputs, merge_datasets

    if not config.output_prefix.parent.is_dir():
        raise UserError(f"--output-prefix {config.output_prefix}: its directory does not exist: create it first")
    prefixes = find_inputs(config.input)
    documents, tokens = merge_datasets(prefixes, config.output_prefix, functools.partial(print, flush=True))
    print(f"{config.output_prefix}: {documents:,} documents, {tokens:,} tokens, of {len(prefixes)} data sets")


entry_point = functools.partial(run_program, main)
