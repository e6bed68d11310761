"""Wirings side by side over an emulated interconnect."""

import os
from collections.abc import Sequence
from typing import NoReturn

from megatron_ladder.comm.ranks import run_ranks
from megatron_ladder.errors import run_program
from megatron_ladder.lab.bench.options import parse_options


def main(argv: Sequence[str]) -> None:
    """Reads the command line and runs, as one rank or as the parent of several."""
    case, options = parse_options(argv)
    if "WORLD_SIZE" not in os.environ and options.processes > 1:
        run_ranks(__name__, argv, options.processes)
        return
    # Imports torch, for which a parent of ranks has no use.
    from megatron_ladder.lab.bench.program import run_rank

    run_rank(case, options)


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
