"""Runs and reports grids of training runs, compared at equal tokens and at equal time."""

import functools
from collections.abc import Sequence

from megatron_ladder.cli.programs import Command
from megatron_ladder.errors import run_program
from megatron_ladder.lab.study.command_line import DESCRIPTIONS, parse_options
from megatron_ladder.lab.study.options import AdaptOptions, ReportOptions, RunOptions

COMMANDS = (
    Command((RunOptions,), "run", DESCRIPTIONS["run"]),
    Command((RunOptions, AdaptOptions), "adapt", DESCRIPTIONS["adapt"]),
    Command((ReportOptions,), "report", DESCRIPTIONS["report"]),
)


def main(argv: Sequence[str]) -> None:
    """Read the command line and run its subcommand."""
    options = parse_options(argv)
    from megatron_ladder.lab.study.adapting import adapt_study
    from megatron_ladder.lab.study.program import run_study
    from megatron_ladder.lab.study.report import report_study

    if isinstance(options, ReportOptions):
        report_study(options)
    elif options.adapt is not None:
        adapt_study(options)
    else:
        run_study(options)


entry_point = functools.partial(run_program, main)
