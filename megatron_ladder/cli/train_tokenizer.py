"""Trains a byte-pair tokenizer: a SentencePiece model, or a byte-level tokenizer.json."""

import functools
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.command_line import parse_config
from megatron_ladder.errors import UserError, run_program, size_text
from megatron_ladder.files import output_problem, write_atomically
from megatron_ladder.flags import flag


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """Input and output."""

    input: tuple[str, ...]
    """Text to train on: files, glob patterns, - or hf://NAME, as in tools/preprocess_data.py."""
    vocab_size: int = flag(minimum=1)
    """Vocabulary size, including 256 bytes and 3 control tokens (bpe: 1)."""
    model_prefix: Path = flag(output="prefix")
    """Prefix of the output file: PREFIX.model, or PREFIX.json with bpe."""
    model_type: Literal["sentencepiece", "bpe"] = "sentencepiece"
    """sentencepiece: byte-pair pieces, for SentencePieceTokenizer. bpe: byte-level byte pairs like GPT-2's, for
    HuggingFaceTokenizer. Both preserve whitespace and can represent any text."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of JSON objects that contain text."""
    max_megabytes: int = flag(100, minimum=1)
    """Train on a sample of approximately this size, taken evenly from the whole input."""


parse_options = functools.partial(parse_config, TrainTokenizerConfig, program="train_tokenizer.py", description=__doc__)


def main(argv: Sequence[str]) -> None:
    """Read the command line and train."""
    config = parse_options(argv)
    from megatron_ladder.data.reading.find import find_sources
    from megatron_ladder.data.reading.protocol import Reading
    from megatron_ladder.data.tokenizer_training import MAX_LINE_BYTES, TRAINERS, TextSample
    from megatron_ladder.tokenizers.kinds import load_tokenizer, tokenizer_kind

    sources = find_sources(config.input, Reading(config.json_keys))
    trainer = TRAINERS[config.model_type]
    (name,) = tokenizer_kind(trainer.tokenizer_type).files
    path = config.model_prefix.with_name(config.model_prefix.name + Path(name).suffix)
    if problem := output_problem(path, "file"):
        raise UserError(f"--model-prefix {config.model_prefix}: cannot write {path}: {problem}: give another")
    sample = TextSample(sources, config.max_megabytes * 1_000_000, in_lines=trainer.in_lines)
    amount = f"at most {size_text(sample.used_bytes)}"
    if sample.input_bytes is not None:
        amount = f"{size_text(sample.used_bytes)} of {size_text(sample.input_bytes)}"
    print(f"training {config.vocab_size} pieces on {amount}", flush=True)
    begun = time.monotonic()
    # Libraries would ignore Ctrl-C for minutes or call it an error; here it ends the process.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        model = trainer.train(sample, config.vocab_size)
    finally:
        signal.signal(signal.SIGINT, before)
    if sample.too_long:
        print(f"{sample.too_long:,} lines of more than {MAX_LINE_BYTES >> 10} KiB were left out")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, model)
    tokenizer = load_tokenizer(trainer.tokenizer_type, path)
    print(f"{path}: {tokenizer.vocab_size} ids, trained in {time.monotonic() - begun:.1f} s")


entry_point = functools.partial(run_program, main)
