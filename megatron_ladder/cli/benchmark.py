"""Benchmarks wirings against each other over an emulated or a real interconnect."""

import functools
import os
from collections.abc import Sequence

from megatron_ladder.cli.programs import Command
from megatron_ladder.comm.ranks import run_ranks
from megatron_ladder.errors import run_program
from megatron_ladder.lab.bench.options import CASES, BenchmarkOptions, parse_options

COMMANDS = (Command((BenchmarkOptions,), "|".join(CASES)),)


def main(argv: Sequence[str]) -> None:
    """Read the command line and measure, as one rank or as the parent of several."""
    case, options = parse_options(argv)
    if "WORLD_SIZE" not in os.environ and options.processes > 1:
        run_ranks(__name__, argv, options.processes)
        return
    from megatron_ladder.lab.bench.program import run_rank

    run_rank(case, options)


entry_point = functools.partial(run_program, main)
