"""Pretrains a Llama-family transformer with Ladder Residual: the program behind `pretrain_ladder.py`."""

import functools
from collections.abc import Sequence

from megatron_ladder.cli.programs import Command
from megatron_ladder.config.run import SECTIONS
from megatron_ladder.errors import run_program
from megatron_ladder.train.stop import StopSignals

COMMANDS = (Command(SECTIONS),)


def main(argv: Sequence[str]) -> None:
    """Run the training that the command line describes."""
    # Importing torch takes seconds, in which a signal would otherwise end the process.
    with StopSignals() as signals:
        from megatron_ladder.train.loop import pretrain

        pretrain(argv, signals)


entry_point = functools.partial(run_program, main)
