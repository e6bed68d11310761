"""Generates text from prompts with a trained model."""

import functools
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from megatron_ladder.comm.ranks import run_ranks
from megatron_ladder.errors import run_program
from megatron_ladder.generate.options import parse_generation

parse_options = parse_generation


def main(argv: Sequence[str]) -> None:
    """Read the command line and generate, as one rank or as the parent of several."""
    options = parse_options(argv)
    ranks = options.model.tp or 1
    # Ctrl-C is how a conversation ends.
    with suppress(KeyboardInterrupt) if options.prompts.interactive else nullcontext():
        if ranks > 1 and "WORLD_SIZE" not in os.environ:
            run_ranks(__name__, argv, ranks)
            return
        from megatron_ladder.generate.program import generate

        generate(options)


entry_point = functools.partial(run_program, main)
