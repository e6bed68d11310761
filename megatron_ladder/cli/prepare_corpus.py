"""The embedded corpus: tokenizer, training and validation tokens from Python's own standard library."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_ladder.data.corpus import prepare_corpus
from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import parse_command_line


@dataclass(frozen=True)
class PrepareCorpusConfig:
    """Output."""

    output_dir: Path
    """Gets tokenizer.model, train_text_document.* and valid_text_document.*; what is there is kept."""
    vocab_size: int = 4096
    """Ids of the tokenizer, among them 256 bytes and 3 control tokens."""
    max_megabytes: float | None = None
    """Use only about so much training text (default: all of it, about 12 MB)."""


def parse_options(argv: Sequence[str]) -> PrepareCorpusConfig:
    """Reads the command line.

    Raises:
        UserError: a line for each mistake.
    """
    config: PrepareCorpusConfig
    (config,) = parse_command_line(
        [PrepareCorpusConfig],
        argv,
        program="prepare_corpus.py",
        description="Makes a small data set from Python's own standard library; nothing is downloaded.",
    )
    mistakes = []
    if config.vocab_size < 1:
        mistakes.append(f"--vocab-size {config.vocab_size}: expected 1 or more")
    if config.max_megabytes is not None and not config.max_megabytes > 0:
        mistakes.append(f"--max-megabytes {config.max_megabytes}: expected more than 0")
    if mistakes:
        raise UserError(*mistakes)
    return config


def main(argv: Sequence[str]) -> None:
    """Reads the command line and does the work."""
    config = parse_options(argv)
    prepare_corpus(
        config.output_dir, config.vocab_size, config.max_megabytes, functools.partial(print, flush=True)
    )


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
