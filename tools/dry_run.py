"""Builds every distinct rank of a training run without devices or data, and checks memory and collectives.

The flags are those of the run, as for pretrain_ladder.py. Two steps run with shapes and no numbers.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from megatron_ladder.command_line import Settings, read_command_line  # noqa: E402
from megatron_ladder.config.run import parse_run  # noqa: E402
from megatron_ladder.errors import ErrorCollector, UserError, run_program  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402


@dataclass(frozen=True)
class DryRunOptions:
    """Dry run. The other flags describe the run."""

    ranks: int = flag(1, minimum=1)
    """Processes of the run."""
    json: Path | None = flag(None, output="file")
    """File for the memory of the ranks that are built, and for all collectives of a step in order."""


def parse_options(argv: Sequence[str]) -> tuple[DryRunOptions, Settings, list[str]]:
    """Read the command line; return also the words that describe the run. Raises UserError with one line per error."""
    words: list[str] = []

    def keep(name: str, values: Sequence[str], _: Settings) -> bool:
        words.extend([f"{name}={values[0]}"] if len(values) == 1 else [name, *values])
        return True

    settings = read_command_line([DryRunOptions], argv, "dry_run.py", __doc__ or "", keep)
    errors = ErrorCollector()
    options = DryRunOptions()
    with errors.collect():
        (options,) = settings.build([DryRunOptions])
    return options, parse_run(words, errors.problems, options.ranks), words


def main(argv: Sequence[str]) -> None:
    """Build the ranks, print what they allocate and communicate, and compare their collectives."""
    options, flags, _ = parse_options(argv)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("a dry run needs no launcher: start it as `python tools/dry_run.py ...`")
    from ladder_lab.dry_run.program import dry_run

    dry_run(flags, options.ranks, options.json)


if __name__ == "__main__":
    run_program(main)
