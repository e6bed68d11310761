"""Tokenizes documents into Megatron's indexed token files."""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.command_line import parse_config
from megatron_ladder.config.megatron_flags import read_megatron_flag
from megatron_ladder.errors import counted, run_program
from megatron_ladder.flags import flag, rule
from megatron_ladder.tokenizers.kinds import TokenizerType


@dataclass(frozen=True)
class PreprocessConfig:
    """Input and output."""

    input: tuple[str, ...]
    """Inputs, read in this order: files, glob patterns such as 'data/*.jsonl.gz' (sorted), - for standard input, and
    hf://NAME[:CONFIG][@SPLIT] for the datasets library (NAME may be a local directory). .jsonl, .json, .ndjson,
    .jsonlines and .jl files, and files that begin with {", have one JSON object per line, and may be compressed (.gz,
    .zst). .parquet files have columns. Any other file is one document of plain text."""
    output_prefix: Path = flag(output="prefix")
    """Prefix of the output files: PREFIX_text_document.bin and .idx, and a .json file that describes them."""
    tokenizer_type: TokenizerType = flag()
    """Type of the tokenizer: Hugging Face (two names), SentencePiece (three names), bytes, or numbers that already
    are token ids. No type adds a bos token."""
    tokenizer_model: Path | None = None
    """SentencePiece .model file; tokenizer.json or its directory."""
    eod_token: str | None = None
    """End-of-document token of a tokenizer.json, if the files next to it name none or another."""
    vocab_size: int | None = None
    """Number of token ids of NullTokenizer, without the end-of-document token."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of JSON objects, or columns of tables, that contain text. Each key gets separate output files."""
    chat: bool = False
    """Treat each record as a conversation, formatted with the tokenizer's chat template. Tokens of the assistant are
    marked in PREFIX_messages_document_loss_mask.bin. Training packs whole conversations."""
    chat_keys: tuple[str, ...] = flag(("messages",), requires="chat")
    """Keys of a conversation: one key of a list of messages, each with role and content (or from, which is human or
    gpt, and value); two keys of an instruction and an output; or three keys of an instruction, an input that is
    appended to it, and an output."""
    chat_template: Path | None = flag(None, requires="chat")
    """File with a Jinja template that replaces the tokenizer's."""
    append_eod: bool = False
    """Append the end-of-document token to each document."""
    parse_special_tokens: bool = False
    """Convert the spelling of a special token in a text, such as </s>, to that token, as Megatron and transformers do.
    By default it stays text, so that only --append-eod ends documents, and only a template writes special tokens."""
    workers: int = flag(1, minimum=1)
    """Number of tokenizer processes."""
    skip_bad_lines: int = flag(0, minimum=0)
    """Number of malformed, non-UTF-8 or oversized lines that may be skipped. Skipped lines are listed; with one more,
    nothing is written."""
    max_document_megabytes: int = flag(64, minimum=1)
    """Maximum size of a line, or of a plain text file."""
    log_interval: int = flag(1000, minimum=1)
    """Documents between updates of the progress display."""

    checks = (
        rule(
            lambda chat, json_keys: chat and json_keys != ("text",),
            "{json_keys} selects texts, but {chat} reads conversations",
            "use {chat_keys}",
        ),
        rule(
            lambda chat_keys: not 1 <= len(chat_keys) <= 3 or not all(map(_is_file_name, chat_keys)),
            "{chat_keys}: expected one to three keys without /",
        ),
        rule(
            lambda json_keys: not all(map(_is_file_name, json_keys)),
            "{json_keys}: expected keys without /, because they become file names",
        ),
        *(
            rule(
                lambda keys: len(set(keys)) < len(keys),
                f"{{{name}}}: a key is repeated",
                "list each key once",
                reads=(name,),
            )
            for name in ("chat_keys", "json_keys")
        ),
    )


def _is_file_name(key: str) -> bool:
    return bool(key) and "/" not in key


parse_options = functools.partial(
    parse_config,
    PreprocessConfig,
    program="preprocess_data.py",
    description=__doc__,
    read_other=functools.partial(read_megatron_flag, preprocessing=True),
)


def main(argv: Sequence[str]) -> None:
    """Read the command line and tokenize."""
    config = parse_options(argv)
    from megatron_ladder.data.chat import ChatTask, ConversationEncoder
    from megatron_ladder.data.chat_records import OPTIONAL_KEYS
    from megatron_ladder.data.encoding import Task
    from megatron_ladder.data.preprocess import PreprocessOptions, dataset_prefix, preprocess
    from megatron_ladder.data.reading.protocol import Reading
    from megatron_ladder.tokenizers.kinds import check_parses_special_tokens, load_tokenizer
    from megatron_ladder.tokenizers.special_tokens import list_tokens

    tokenizer = load_tokenizer(config.tokenizer_type, config.tokenizer_model, config.vocab_size, config.eod_token)
    if config.parse_special_tokens:
        check_parses_special_tokens("parse_special_tokens", tokenizer)
    reading = Reading(
        config.chat_keys if config.chat else config.json_keys,
        texts_only=not config.chat,
        optional_keys=tuple(key for key in OPTIONAL_KEYS if key not in config.chat_keys) if config.chat else (),
        max_bytes=config.max_document_megabytes << 20,
        max_bad=config.skip_bad_lines,
        keys_field="chat_keys" if config.chat else "json_keys",
    )
    options = PreprocessOptions(config.workers, config.log_interval, _print_message)
    task = Task(tokenizer, reading, config.append_eod, config.parse_special_tokens)
    if config.chat:
        encoder = ConversationEncoder(tokenizer, config.chat_template, config.parse_special_tokens)
        task = ChatTask(tokenizer, reading, config.append_eod, config.parse_special_tokens, encoder=encoder)
    if not (config.append_eod or config.chat):
        _print_message("no end-of-document tokens: documents will run into each other in training; see --append-eod")
    sidecars = preprocess(config.input, config.output_prefix, task, options)
    for key, sidecar in sidecars.items():
        prefix = dataset_prefix(config.output_prefix, key)
        skipped = f", {counted(sidecar.skipped, 'bad line')} skipped" if sidecar.skipped else ""
        _print_message(
            f"{prefix}: {counted(sidecar.documents, 'document')}, {counted(sidecar.tokens, 'token')}{skipped}"
        )
        if config.chat:
            names = {tokenizer.eod_id: tokenizer.named_tokens().get("eos_token", ""), **tokenizer.control_tokens}
            ends = " ".join(names[number] for number in sidecar.answer_ends)
            if ends:
                _print_message(f"answers end with {ends}")
                continue
            fix = "pass a --chat-template that writes one, or the model will not learn to end an answer"
            known = list_tokens(list(names.values()), " ") or "none"
            _print_message(f"answers do not end with a special token: {fix}; the tokenizer has {known}")


def _print_message(line: str) -> None:
    print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, flush=True)


entry_point = functools.partial(run_program, main)
