"""Studies: grids of trainings, compared at equal tokens and at equal time."""

from collections.abc import Sequence
from typing import NoReturn

from megatron_ladder.errors import run_program
from megatron_ladder.lab.study.adapting import adapt_study
from megatron_ladder.lab.study.command_line import parse_options
from megatron_ladder.lab.study.options import ReportOptions
from megatron_ladder.lab.study.program import report_study, run_study


def main(argv: Sequence[str]) -> None:
    """Reads the command line and does what its first word says."""
    options = parse_options(argv)
    if isinstance(options, ReportOptions):
        report_study(options)
    elif options.adapt is not None:
        adapt_study(options, argv)
    else:
        run_study(options, argv)


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
