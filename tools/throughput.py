"""Measures the training throughput of one device, compared with transformers."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ladder_lab.bench.options import ThroughputOptions  # noqa: E402
from megatron_ladder.command_line import parse_config  # noqa: E402
from megatron_ladder.errors import run_program  # noqa: E402

parse_options = functools.partial(parse_config, ThroughputOptions, program="throughput.py", description=__doc__)


def main(argv: Sequence[str]) -> None:
    """Measure, print tables and write the rows; raise BadNumbersError if a ratio is too noisy to judge."""
    options = parse_options(argv)
    from ladder_lab.bench.throughput import run

    run(options)


if __name__ == "__main__":
    run_program(main)
