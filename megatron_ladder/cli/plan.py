"""Predicts layouts, memory and step times of a training run before it starts; needs no GPU."""

import functools
import os
from collections.abc import Sequence

from megatron_ladder.cli.programs import Command
from megatron_ladder.comm.ranks import run_ranks
from megatron_ladder.errors import run_program
from megatron_ladder.lab.plan.options import (
    DESCRIPTIONS,
    KINDS,
    CalibrateOptions,
    InferenceOptions,
    LayoutOptions,
    parse_options,
)

COMMANDS = tuple(Command((kind,), verb, DESCRIPTIONS[verb]) for verb, kind in KINDS.items())


def main(argv: Sequence[str]) -> None:
    """Read the command line and run its subcommand; calibration runs as several ranks."""
    options = parse_options(argv)
    if isinstance(options, CalibrateOptions):
        if "WORLD_SIZE" not in os.environ:
            run_ranks(__name__, argv, options.tp)
            return
        from megatron_ladder.lab.plan.measure import run_rank

        run_rank(options)
        return
    if isinstance(options, LayoutOptions):
        from megatron_ladder.lab.plan.program import print_layouts

        print_layouts(options)
        return
    if isinstance(options, InferenceOptions):
        from megatron_ladder.lab.plan.inference import print_inference

        print_inference(options)
        return
    from megatron_ladder.lab.plan.published import print_paper

    print_paper(options)


entry_point = functools.partial(run_program, main)
