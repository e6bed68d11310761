"""Prints the contents of indexed data sets, and checks that they are complete."""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.command_line import parse_config
from megatron_ladder.errors import run_program
from megatron_ladder.flags import flag
from megatron_ladder.tokenizers.kinds import TokenizerType


@dataclass(frozen=True)
class InspectConfig:
    """Data."""

    data_path: tuple[Path, ...]
    """Prefixes of data sets; `--data-path` may be omitted if they come first."""
    documents: tuple[str, ...] = ()
    """Documents to print: numbers and ranges, such as 0 5-7."""
    tokenizer_type: TokenizerType | None = None
    """Type of the tokenizer that produced the data; needed to print text."""
    tokenizer_model: Path | None = flag(None, requires="tokenizer_type")
    """File or directory of the tokenizer; ByteTokenizer and NullTokenizer have none."""
    vocab_size: int | None = None
    """Number of token ids of NullTokenizer, without the end-of-document token."""
    verify: bool = False
    """Read all data and compare it with the checksums that preprocessing recorded."""


def parse_options(argv: Sequence[str]) -> InspectConfig:
    words = ["--data-path", *argv] if argv and not argv[0].startswith("-") else list(argv)
    return parse_config(InspectConfig, words, "inspect_data.py", __doc__)


def main(argv: Sequence[str]) -> None:
    """Read the command line and print."""
    config = parse_options(argv)
    from megatron_ladder.data.indexed import IndexedDataset
    from megatron_ladder.data.inspect import parse_documents, show_document, summary, verify
    from megatron_ladder.data.loader import check_tokenizer
    from megatron_ladder.tokenizers.kinds import load_tokenizer

    tokenizer = None
    if config.tokenizer_type is not None:
        tokenizer = load_tokenizer(config.tokenizer_type, config.tokenizer_model, config.vocab_size)
    for prefix in config.data_path:
        dataset = IndexedDataset(prefix)
        if tokenizer is not None:
            check_tokenizer([dataset], tokenizer)
        lines = list(summary(dataset)) + (verify(dataset) if config.verify else [])
        for number in parse_documents(config.documents, len(dataset)):
            lines.extend(show_document(dataset, number, tokenizer))
        sys.stdout.write("\n".join(lines) + "\n")


entry_point = functools.partial(run_program, main)
