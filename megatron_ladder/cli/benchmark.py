"""Benchmarks wirings against each other over an emulated or a real interconnect."""

import functools
import os
from collections.abc import Sequence

from megatron_ladder.cli.programs import Command
from megatron_ladder.comm.ranks import run_ranks
from megatron_ladder.errors import run_program
from megatron_ladder.lab.bench.options import CASES, SERVE, BenchmarkOptions, RequestsOptions, parse_options

COMMANDS = (Command((BenchmarkOptions,), "|".join(CASES)), Command((RequestsOptions,), SERVE))


def main(argv: Sequence[str]) -> None:
    """Read the command line and measure, as one rank or as the parent of several."""
    parsed = parse_options(argv)
    options = parsed if isinstance(parsed, RequestsOptions) else parsed[1]
    if "WORLD_SIZE" not in os.environ and options.processes > 1:
        run_ranks(__name__, argv, options.processes)
    elif isinstance(parsed, RequestsOptions):
        from megatron_ladder.lab.bench.requests import run_requests

        run_requests(parsed)
    else:
        from megatron_ladder.lab.bench.program import run_rank

        run_rank(*parsed)


entry_point = functools.partial(run_program, main)
