"""Documents to Megatron's indexed token files."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_ladder.data.chat import chat_task
from megatron_ladder.data.encoders.choose import TokenizerLibrary
from megatron_ladder.data.preprocess import PreprocessOptions, dataset_prefix, preprocess, run_task
from megatron_ladder.data.reading.find import find_sources
from megatron_ladder.data.reading.protocol import Reading
from megatron_ladder.data.tokenizers import TokenizerSource, TokenizerType, load_source
from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import flag, parse_command_line


@dataclass(frozen=True)
class PreprocessConfig:
    """Input and output."""

    input: tuple[str, ...]
    """What to read, in this order: files, patterns such as 'data/*.jsonl.gz' (sorted), - for standard input, and
    hf://NAME[:CONFIG][@SPLIT] for what the datasets library knows (NAME may be a local directory). .jsonl, .json and
    .ndjson hold a JSON object a line, and may be compressed (.gz, .zst); .parquet has columns; any other file is plain
    text, one document."""
    output_prefix: Path
    """Beginning of the output's names: PREFIX_text_document.bin and .idx, and a .json describing them."""
    tokenizer_type: TokenizerType
    """Kind of tokenizer: three names for SentencePiece, two for Hugging Face, GPT-2's byte pairs, bytes, and numbers
    that are tokens already. None adds a bos token."""
    tokenizer_model: Path | None = flag(None, aliases=("--vocab-file",))
    """SentencePiece .model file; or tokenizer.json, or a directory that holds one; or GPT-2's vocab.json."""
    merge_file: Path | None = None
    """GPT-2's merges.txt; the one beside its vocab.json if not given."""
    vocab_size: int | None = None
    """Ids of NullTokenizer, without the end of a document."""
    tokenizer_library: TokenizerLibrary = "auto"
    """Library that does the work; auto is the fastest one whose ids are the tokenizer's own on a sample."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a JSON object, or columns of a table, whose texts are tokenised, each into files of its own."""
    chat: bool = False
    """Every record is a conversation, written by the tokenizer's own template. What the assistant says is marked in
    PREFIX_messages_document_loss_mask.bin. Training packs conversations whole."""
    chat_keys: tuple[str, ...] = ("messages",)
    """Keys of a conversation: of its list of messages, each with role and content, or from (human, gpt) and value; or
    of an instruction and an output; or of an instruction, an input that is added to it, and an output."""
    chat_template: Path | None = None
    """File with a Jinja template to use instead of the tokenizer's own."""
    append_eod: bool = False
    """End every document with the end-of-document token."""
    workers: int = 1
    """Processes that tokenise."""
    partitions: int = 1
    """Input files that are read side by side, for compressed files and data sets, which one process reads too slowly
    for many workers. It changes nothing in the output."""
    skip_bad_lines: int = 0
    """Lines that may be passed over because they are malformed, not UTF-8, or too large; they are listed. One more of
    them, and nothing is written."""
    max_document_megabytes: int = 64
    """Largest line, or file of plain text."""
    log_interval: int = 1000
    """Documents between progress lines (a line a second at most)."""


def config_mistakes(config: PreprocessConfig) -> list[str]:
    """A line for each value that cannot be."""
    mistakes = [
        f"--{name.replace('_', '-')} {getattr(config, name)}: expected 1 or more"
        for name in ("workers", "partitions", "max_document_megabytes", "log_interval")
        if getattr(config, name) < 1
    ]
    of_chat = {"--chat-keys": config.chat_keys != ("messages",), "--chat-template": config.chat_template is not None}
    if not config.chat:
        mistakes += [f"{name} has no meaning without --chat" for name, given in of_chat.items() if given]
    if config.chat and config.json_keys != ("text",):
        mistakes.append("--json-keys names texts, and --chat reads conversations: use --chat-keys")
    if not 1 <= len(config.chat_keys) <= 3 or any(not key or "/" in key for key in config.chat_keys):
        mistakes.append(f"--chat-keys {' '.join(config.chat_keys)}: expected one to three keys without / in them")
    if config.skip_bad_lines < 0:
        mistakes.append(f"--skip-bad-lines {config.skip_bad_lines}: expected 0 or more")
    if not config.output_prefix.name:
        mistakes.append(f"--output-prefix {config.output_prefix}: expected the beginning of a file's name")
    if any(not key or "/" in key for key in config.json_keys):
        mistakes.append(f"--json-keys {' '.join(config.json_keys)}: a key names a file, so it has no / in it")
    if len(set(config.json_keys)) < len(config.json_keys):
        mistakes.append(f"--json-keys {' '.join(config.json_keys)}: a key is named twice")
    return mistakes


def parse_options(argv: Sequence[str]) -> PreprocessConfig:
    """Reads the command line.

    Raises:
        UserError: a line for each mistake.
    """
    config: PreprocessConfig
    (config,) = parse_command_line(
        [PreprocessConfig], argv, program="preprocess_data.py", description="Tokenises text for pretraining."
    )
    mistakes = config_mistakes(config)
    if mistakes:
        raise UserError(*mistakes)
    return config


def main(argv: Sequence[str]) -> None:
    """Reads the command line and does the work."""
    config = parse_options(argv)
    tokenizer = load_source(
        TokenizerSource(config.tokenizer_type, config.tokenizer_model, config.merge_file, config.vocab_size)
    )
    say, show = _printers()
    reading = Reading(
        config.chat_keys if config.chat else config.json_keys,
        texts_only=not config.chat,
        most_bytes=config.max_document_megabytes << 20,
        most_bad=config.skip_bad_lines,
    )
    options = PreprocessOptions(
        config.workers, config.partitions, config.log_interval, config.tokenizer_library, say, show
    )
    if config.chat:
        sources = find_sources(config.input, reading)
        task = chat_task(tokenizer, config.chat_template, reading, config.append_eod)
        sidecars = run_task(sources, config.output_prefix, tokenizer, task, options)
    else:
        sidecars = preprocess(config.input, config.output_prefix, tokenizer, config.append_eod, reading, options)
    for key, sidecar in sidecars.items():
        prefix = dataset_prefix(config.output_prefix, key)
        skipped = f", {sidecar.skipped:,} bad lines skipped" if sidecar.skipped else ""
        say(f"{prefix}: {sidecar.documents:,} documents, {sidecar.tokens:,} tokens{skipped}")


def _printers() -> tuple[Callable[[str], None], Callable[[str], None]]:
    """What prints sentences, and what prints progress: on a terminal, over the line before."""
    begin, end = ("\r\x1b[K", "") if sys.stdout.isatty() else ("", "\n")

    def say(line: str) -> None:
        print(f"{begin}{line}", flush=True)

    def show(line: str) -> None:
        print(f"{begin}{line}", end=end, flush=True)

    return say, show


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
