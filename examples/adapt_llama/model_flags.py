"""Prints the flags with which pretrain_ladder.py builds the model of a Hugging Face directory, one word per line.

The flags of the wiring are left out: they are the choice of the user who adapts the model.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

sys.path.append(str(Path(__file__).resolve().parents[2]))

from megatron_ladder.convert.hf_directory import open_hf_directory  # noqa: E402
from megatron_ladder.errors import run_program  # noqa: E402
from megatron_ladder.flags import parse_command_line  # noqa: E402


@dataclass(frozen=True)
class FlagsOptions:
    """Input."""

    hf: Path
    """Directory with config.json and safetensors; only their headers are read."""


def main(argv: Sequence[str]) -> None:
    """Print the flags of a directory."""
    options: FlagsOptions
    (options,) = parse_command_line(
        [FlagsOptions], argv, program="model_flags.py", description="Flags of pretrain_ladder.py for a model."
    )
    print(*open_hf_directory(options.hf).model.in_wiring("standard").to_words(), sep="\n")


def entry_point() -> NoReturn:
    """Run as a program."""
    run_program(main)


if __name__ == "__main__":
    entry_point()
