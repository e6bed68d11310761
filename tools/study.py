"""Runs and reports grids of training runs, compared at equal tokens and at equal time."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ladder_lab.study.options import ReportOptions, parse_study  # noqa: E402
from megatron_ladder.errors import run_program  # noqa: E402

parse_options = parse_study


def main(argv: Sequence[str]) -> None:
    """Read the command line and run its subcommand."""
    parsed = parse_options(argv)
    if isinstance(parsed, ReportOptions):
        from ladder_lab.study.report import write_report

        print(f"report: {write_report(parsed.output_dir)}")
    else:
        from ladder_lab.study.program import run_study

        run_study(parsed)


if __name__ == "__main__":
    run_program(main)
