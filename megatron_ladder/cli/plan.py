"""Layouts, memory and step times of a training run before it is started; needs no GPU."""

import os
from collections.abc import Sequence
from typing import NoReturn

from megatron_ladder.comm.ranks import run_ranks
from megatron_ladder.errors import run_program
from megatron_ladder.lab.plan.options import CalibrateOptions, LayoutOptions, parse_options


def main(argv: Sequence[str]) -> None:
    """Reads the command line and does what its first word says; measuring runs as several ranks."""
    options = parse_options(argv)
    if isinstance(options, CalibrateOptions):
        if "WORLD_SIZE" not in os.environ:
            run_ranks(__name__, argv, options.tp)
            return
        # Imports torch, which planning has no use for.
        from megatron_ladder.lab.plan.measure import run_rank

        run_rank(options)
        return
    # Not above: a parent of ranks has no use for numpy.
    from megatron_ladder.lab.plan.program import print_layouts, print_paper

    if isinstance(options, LayoutOptions):
        print_layouts(options)
    else:
        print_paper(options)


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
