"""Runs and reports grids of training runs, compared at equal tokens and at equal time."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ladder_lab.study.command_line import DESCRIPTIONS, parse_options  # noqa: E402
from ladder_lab.study.options import AdaptOptions, ReportOptions, RunOptions  # noqa: E402
from megatron_ladder.cli.programs import Command  # noqa: E402
from megatron_ladder.errors import run_program  # noqa: E402

COMMANDS = (
    Command((RunOptions,), "run", DESCRIPTIONS["run"]),
    Command((RunOptions, AdaptOptions), "adapt", DESCRIPTIONS["adapt"]),
    Command((ReportOptions,), "report", DESCRIPTIONS["report"]),
)


def main(argv: Sequence[str]) -> None:
    """Read the command line and run its subcommand."""
    options = parse_options(argv)
    from ladder_lab.study.adapting import adapt_study
    from ladder_lab.study.program import run_study
    from ladder_lab.study.report import report_study

    if isinstance(options, ReportOptions):
        report_study(options)
    elif options.adapt is not None:
        adapt_study(options)
    else:
        run_study(options)


if __name__ == "__main__":
    run_program(main)
