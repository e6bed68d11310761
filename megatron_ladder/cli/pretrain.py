"""Pretraining: the program behind `pretrain_ladder.py`."""

from collections.abc import Sequence
from typing import NoReturn

from megatron_ladder.errors import run_program


def main(argv: Sequence[str]) -> None:
    """Trains as the command line says; see --help."""
    from megatron_ladder.train.loop import pretrain

    pretrain(argv)


def entry_point() -> NoReturn:
    """`megatron-ladder-pretrain`."""
    run_program(main)
