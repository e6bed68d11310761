"""Text files to Megatron's indexed token files."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_ladder.config.fields import parse_command_line
from megatron_ladder.data.preprocess import dataset_prefix, preprocess
from megatron_ladder.data.tokenizers import TokenizerType, load_tokenizer
from megatron_ladder.errors import UserError, run_program


@dataclass(frozen=True)
class PreprocessConfig:
    """Input and output."""

    input: tuple[Path, ...]
    """Files to read, in this order. .jsonl, .json and .ndjson hold a JSON object a line; any other file is
    plain text, one document."""
    output_prefix: Path
    """Beginning of the output's names: PREFIX_text_document.bin and .idx, and a .json describing them."""
    tokenizer_type: TokenizerType
    """Kind of tokenizer: three names for SentencePiece, two for Hugging Face. None adds a bos token."""
    tokenizer_model: Path
    """SentencePiece .model file; or tokenizer.json, or a directory that holds one."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a JSON object whose texts are tokenised, each into files of its own."""
    append_eod: bool = False
    """End every document with the end-of-document token."""
    workers: int = 1
    """Processes that tokenise."""
    log_interval: int = 1000
    """Documents between progress lines (a line a second at most)."""


def main(argv: Sequence[str]) -> None:
    """Reads the command line and does the work."""
    config: PreprocessConfig
    (config,) = parse_command_line(
        [PreprocessConfig], argv, program="preprocess_data.py", description="Tokenises text for pretraining."
    )
    mistakes = [
        f"--{name.replace('_', '-')} {getattr(config, name)}: expected 1 or more"
        for name in ("workers", "log_interval")
        if getattr(config, name) < 1
    ]
    if not config.output_prefix.name:
        mistakes.append(f"--output-prefix {config.output_prefix}: expected the beginning of a file's name")
    if any(not key or "/" in key for key in config.json_keys):
        mistakes.append(f"--json-keys {' '.join(config.json_keys)}: a key names a file, so it has no / in it")
    if len(set(config.json_keys)) < len(config.json_keys):
        mistakes.append(f"--json-keys {' '.join(config.json_keys)}: a key is named twice")
    if mistakes:
        raise UserError(*mistakes)
    sidecars = preprocess(
        config.input,
        config.output_prefix,
        load_tokenizer(config.tokenizer_type, config.tokenizer_model),
        json_keys=config.json_keys,
        append_eod=config.append_eod,
        workers=config.workers,
        log_interval=config.log_interval,
        report=functools.partial(print, flush=True),
    )
    for key, sidecar in sidecars.items():
        prefix = dataset_prefix(config.output_prefix, key)
        print(f"{prefix}: {sidecar.documents:,} documents, {sidecar.tokens:,} tokens")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
