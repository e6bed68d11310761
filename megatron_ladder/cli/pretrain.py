"""Pretrains a Llama-family transformer with Ladder Residual: the program behind `pretrain_ladder.py`."""

import functools
import os
from collections.abc import Sequence

from megatron_ladder.cli.programs import Command
from megatron_ladder.config.run import SECTIONS, RunFlags, parse_run
from megatron_ladder.errors import raise_user_errors, run_program
from megatron_ladder.train.stop import StopSignals

COMMANDS = (Command(SECTIONS),)


def parse_options(argv: Sequence[str]) -> RunFlags:
    """Read the command line; raise a UserError with one line per value that is not valid by itself."""
    errors: list[str] = []
    flags = parse_run(argv, errors)
    raise_user_errors(errors)
    return flags


def main(argv: Sequence[str]) -> None:
    """Run the training that the command line describes."""
    # Several processes report their errors to each other, which needs torch.
    if os.environ.get("WORLD_SIZE", "1") == "1" and parse_options(argv).parallel.dry_run:
        from megatron_ladder.lab.dry_run.program import dry_run

        return dry_run(argv)
    # Importing torch takes seconds, in which a signal would otherwise end the process.
    with StopSignals() as signals:
        from megatron_ladder.train.loop import pretrain

        pretrain(argv, signals)


entry_point = functools.partial(run_program, main)
