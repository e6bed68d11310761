"""Builds a small data set from Python's standard library; nothing is downloaded."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.cli.programs import Command
from megatron_ladder.command_line import parse_config
from megatron_ladder.errors import run_program
from megatron_ladder.flags import flag


@dataclass(frozen=True)
class PrepareCorpusConfig:
    """Output."""

    output_dir: Path = flag(output="directory")
    """Directory for tokenizer.model, train_text_document.* and valid_text_document.*; existing files are kept."""
    vocab_size: int = flag(4096, minimum=1)
    """Vocabulary size of the tokenizer, including 256 bytes and 3 control tokens."""
    max_megabytes: float | None = flag(None, above=0)
    """Use approximately this much training text; all of it, about 12 MB, by default."""


COMMANDS = (Command((PrepareCorpusConfig,)),)
parse_options = functools.partial(parse_config, PrepareCorpusConfig, program="prepare_corpus.py", description=__doc__)


def main(argv: Sequence[str]) -> None:
    """Read the command line and build the data set."""
    config = parse_options(argv)
    from megatron_ladder.data.corpus import prepare_corpus

    prepare_corpus(config.output_dir, config.vocab_size, config.max_megabytes, functools.partial(print, flush=True))


entry_point = functools.partial(run_program, main)
