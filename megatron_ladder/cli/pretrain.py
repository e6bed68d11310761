"""Pretrains a Llama-family transformer with Ladder Residual: the program behind `pretrain_ladder.py`."""

from collections.abc import Sequence
from typing import NoReturn

from megatron_ladder.errors import run_program
from megatron_ladder.train.stop import StopSignals


def main(argv: Sequence[str]) -> None:
    """Trains as the command line says; see --help."""
    # Before torch is imported, which takes seconds in which a signal would end the process otherwise.
    with StopSignals() as signals:
        from megatron_ladder.train.loop import pretrain

        pretrain(argv, signals)


def entry_point() -> NoReturn:
    """`megatron-ladder-pretrain`."""
    run_program(main)
