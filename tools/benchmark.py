"""Benchmarks wirings against each other over an emulated or a real interconnect."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ladder_lab.bench.options import parse_benchmark  # noqa: E402
from megatron_ladder.comm.ranks import run_ranks  # noqa: E402
from megatron_ladder.errors import run_program  # noqa: E402

parse_options = parse_benchmark


def main(argv: Sequence[str]) -> None:
    """Read the command line and measure, as one rank or as the parent of several."""
    case, options = parse_options(argv)
    if "WORLD_SIZE" not in os.environ and not options.emulate:
        run_ranks(__file__, argv, options.ranks)
    else:
        from ladder_lab.bench.program import run_rank

        run_rank(case, options)


if __name__ == "__main__":
    run_program(main)
