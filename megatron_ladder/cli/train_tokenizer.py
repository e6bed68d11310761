"""Text files to a SentencePiece model."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_ladder.config.fields import parse_command_line
from megatron_ladder.data.documents import check_inputs, read_documents, span_groups
from megatron_ladder.data.files import write_atomically
from megatron_ladder.data.tokenizers import SentencePieceTokenizer, train_sentencepiece
from megatron_ladder.errors import UserError, run_program


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """Input and output."""

    input: tuple[Path, ...]
    """Files to learn from. .jsonl, .json and .ndjson hold a JSON object a line; any other file is plain
    text."""
    vocab_size: int
    """Ids of the tokenizer, among them 256 bytes and 3 control tokens."""
    model_prefix: Path
    """The model is written to PREFIX.model."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a JSON object whose texts are learnt from."""
    max_megabytes: int = 100
    """Learn from a sample of about this size, taken evenly from all over a larger input."""


def main(argv: Sequence[str]) -> None:
    """Reads the command line and does the work."""
    config: TrainTokenizerConfig
    (config,) = parse_command_line(
        [TrainTokenizerConfig],
        argv,
        program="train_tokenizer.py",
        description="Trains a SentencePiece tokenizer (byte-pair, byte fallback, whitespace kept).",
    )
    mistakes = [
        f"--{name.replace('_', '-')} {getattr(config, name)}: expected 1 or more"
        for name in ("vocab_size", "max_megabytes")
        if getattr(config, name) < 1
    ]
    if mistakes:
        raise UserError(*mistakes)
    check_inputs(config.input, config.json_keys)
    total = sum(path.stat().st_size for path in config.input)
    used = min(total, config.max_megabytes * 1_000_000)
    print(f"training {config.vocab_size} pieces on {used / 1e6:.1f} of {total / 1e6:.1f} MB", flush=True)
    begun = time.monotonic()
    model = train_sentencepiece(_sample_lines(config, used / max(total, 1)), config.vocab_size)
    path = config.model_prefix.with_name(config.model_prefix.name + ".model")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, model)
    tokenizer = SentencePieceTokenizer(path)
    print(f"{path}: {tokenizer.vocab_size} ids, trained in {time.monotonic() - begun:.1f} s")


def _sample_lines(config: TrainTokenizerConfig, share: float) -> Iterator[str]:
    """The given share of all lines, evenly spaced."""
    groups = span_groups(config.input)
    documents = (
        texts for group in groups for span in group for texts in read_documents(span, config.json_keys)
    )
    lines = (line for texts in documents for text in texts for line in text.split("\n"))
    counted = zip(itertools.count(), lines, strict=False)
    return (line for number, line in counted if int((number + 1) * share) > int(number * share))


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
