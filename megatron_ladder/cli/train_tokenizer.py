"""Trains a byte-pair tokenizer: a SentencePiece model, or a byte-level tokenizer.json."""

import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.cli.programs import Command
from megatron_ladder.data.reading.find import find_sources, group_blocks
from megatron_ladder.data.reading.protocol import Reading, Source
from megatron_ladder.data.tokenizer_training import MAX_LINE_BYTES, train_bpe, train_sentencepiece
from megatron_ladder.data.tokenizers import load_tokenizer
from megatron_ladder.errors import UserError, run_program
from megatron_ladder.files import write_atomically
from megatron_ladder.flags import flag, parse_config


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """Input and output."""

    input: tuple[str, ...]
    """Text to train on: files, glob patterns, - or hf://NAME, as in tools/preprocess_data.py."""
    vocab_size: int = flag(minimum=1)
    """Vocabulary size, including 256 bytes and 3 control tokens (bpe: 1)."""
    model_prefix: Path = flag()
    """Prefix of the output file: PREFIX.model, or PREFIX.json with bpe."""
    model_type: Literal["sentencepiece", "bpe"] = "sentencepiece"
    """sentencepiece: byte-pair pieces, for SentencePieceTokenizer. bpe: byte-level byte pairs like GPT-2's, for
    HuggingFaceTokenizer. Both preserve whitespace and can represent any text."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of JSON objects that contain text."""
    max_megabytes: int = flag(100, minimum=1)
    """Train on a sample of approximately this size, taken evenly from the whole input."""


COMMANDS = (Command((TrainTokenizerConfig,)),)
parse_options = functools.partial(parse_config, TrainTokenizerConfig, program="train_tokenizer.py", description=__doc__)

_PIECE_CHARACTERS = 1 << 14
"""Approximate size of the pieces of text for the bpe trainer, which also learns line feeds."""


class _TextSample:
    """Text for a trainer, sampled evenly from the whole input; counts the lines that are too long for it."""

    def __init__(self, sources: Sequence[Source], reading: Reading, most_bytes: int, in_lines: bool) -> None:
        """Prepare a sample of about `most_bytes`, or that much of the beginning of an input of unknown size."""
        self.input_bytes = sum(source.total_bytes or 0 for source in sources)
        self.used_bytes = min(self.input_bytes, most_bytes) or most_bytes
        self.too_long = 0
        self._share = self.used_bytes / self.input_bytes if self.input_bytes else 1.0
        self._most_bytes = math.inf if self.input_bytes else most_bytes
        self._sources, self._reading, self._in_lines = sources, reading, in_lines

    def __iter__(self) -> Iterator[str]:
        """Yield lines or larger pieces, evenly spaced; raises UserError if a record cannot be read."""
        taken = 0
        for number, piece in enumerate(self._pieces()):
            if int((number + 1) * self._share) == int(number * self._share):
                continue
            # A character has at most four bytes, so only few lines must be encoded to be measured.
            if self._in_lines and 4 * len(piece) > MAX_LINE_BYTES and len(piece.encode()) > MAX_LINE_BYTES:
                self.too_long += 1
                continue
            taken += len(piece)
            if taken > self._most_bytes:
                return
            yield piece

    def _pieces(self) -> Iterator[str]:
        records: dict[int, int] = {}
        for number, block in itertools.chain.from_iterable(group_blocks(self._sources, self._reading)):
            parsed = block.read(self._reading)
            before = records.get(number, 0)
            for bad in parsed.bad:
                raise UserError(f"{self._sources[number].place(before + bad.number)}: {bad.reason}")
            records[number] = before + parsed.records
            for text in itertools.chain.from_iterable(parsed.columns):
                if self._in_lines:
                    yield from text.split("\n")
                    continue
                begin = 0
                while begin < len(text):
                    end = text.find("\n", begin + _PIECE_CHARACTERS)
                    end = len(text) if end < 0 else end
                    yield text[begin:end]
                    begin = end


def main(argv: Sequence[str]) -> None:
    """Read the command line and train."""
    config = parse_options(argv)
    reading = Reading(config.json_keys)
    sources = find_sources(config.input, reading)
    is_sentencepiece = config.model_type == "sentencepiece"
    sample = _TextSample(sources, reading, config.max_megabytes * 1_000_000, in_lines=is_sentencepiece)
    of = f" of {sample.input_bytes / 1e6:.1f}" if sample.input_bytes else ""
    print(f"training {config.vocab_size} pieces on {sample.used_bytes / 1e6:.1f}{of} MB", flush=True)
    begun = time.monotonic()
    model = (train_sentencepiece if is_sentencepiece else train_bpe)(sample, config.vocab_size)
    if sample.too_long:
        print(f"{sample.too_long:,} lines of more than {MAX_LINE_BYTES >> 10} KiB were left out")
    path = config.model_prefix.with_name(config.model_prefix.name + (".model" if is_sentencepiece else ".json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, model)
    tokenizer = load_tokenizer("SentencePieceTokenizer" if is_sentencepiece else "HuggingFaceTokenizer", path)
    print(f"{path}: {tokenizer.vocab_size} ids, trained in {time.monotonic() - begun:.1f} s")


entry_point = functools.partial(run_program, main)
