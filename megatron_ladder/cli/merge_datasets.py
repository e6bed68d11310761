"""Merges indexed data sets into one."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.cli.programs import Command
from megatron_ladder.command_line import parse_config
from megatron_ladder.errors import run_program
from megatron_ladder.flags import flag


@dataclass(frozen=True)
class MergeConfig:
    """Input and output."""

    input: tuple[Path, ...]
    """Data sets to merge, in this order: prefixes (of .bin and .idx), or directories, whose data sets are merged in
    the order of their names."""
    output_prefix: Path = flag(output="prefix")
    """Path of the output without .bin and .idx."""


COMMANDS = (Command((MergeConfig,)),)


parse_options = functools.partial(parse_config, MergeConfig, program="merge_datasets.py", description=__doc__)


def main(argv: Sequence[str]) -> None:
    """Read the command line and merge."""
    config = parse_options(argv)
    from megatron_ladder.data.merge import find_inputs, merge_datasets

    prefixes = find_inputs(config.input)
    config.output_prefix.parent.mkdir(parents=True, exist_ok=True)
    documents, tokens = merge_datasets(prefixes, config.output_prefix, functools.partial(print, flush=True))
    print(f"{config.output_prefix}: {documents:,} documents, {tokens:,} tokens, of {len(prefixes)} data sets")


entry_point = functools.partial(run_program, main)
