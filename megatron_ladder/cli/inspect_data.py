"""What an indexed data set holds, with its text, and whether it is whole."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_ladder.data.indexed import IndexedDataset
from megatron_ladder.data.inspect import parse_documents, show_document, summary, verify
from megatron_ladder.data.sidecar import check_sidecar
from megatron_ladder.data.tokenizers import TokenizerType, load_tokenizer
from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import parse_command_line


@dataclass(frozen=True)
class InspectConfig:
    """Data."""

    data_path: tuple[Path, ...]
    """Prefixes of data sets; may stand first without the flag."""
    documents: tuple[str, ...] = ()
    """Documents to print: numbers and ranges, such as 0 5-7."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer that made the data, to print its text."""
    tokenizer_model: Path | None = None
    """The tokenizer's file or directory."""
    verify: bool = False
    """Read everything and compare it with the checksums that preprocessing wrote down."""


def parse_options(argv: Sequence[str]) -> InspectConfig:
    """Reads the command line.

    Raises:
        UserError: a line for each mistake.
    """
    first_flag = next((place for place, word in enumerate(argv) if word.startswith("--")), len(argv))
    words = ["--data-path", *argv] if first_flag > 0 else list(argv)
    config: InspectConfig
    (config,) = parse_command_line(
        [InspectConfig], words, program="inspect_data.py", description="Shows what indexed data sets hold."
    )
    if (config.tokenizer_type is None) != (config.tokenizer_model is None):
        raise UserError("--tokenizer-type and --tokenizer-model belong together: give both")
    return config


def main(argv: Sequence[str]) -> None:
    """Reads the command line and prints."""
    config = parse_options(argv)
    tokenizer = None
    if config.tokenizer_type is not None and config.tokenizer_model is not None:
        tokenizer = load_tokenizer(config.tokenizer_type, config.tokenizer_model)
    for prefix in config.data_path:
        dataset = IndexedDataset(prefix)
        if tokenizer is not None:
            check_sidecar(dataset, tokenizer)
        lines = list(summary(dataset)) + (verify(prefix) if config.verify else [])
        for number in parse_documents(config.documents, len(dataset)):
            lines.extend(show_document(dataset, number, tokenizer))
        sys.stdout.write("\n".join(lines) + "\n")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
