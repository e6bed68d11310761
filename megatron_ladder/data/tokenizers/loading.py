"""Which tokenizer a command line asks for, and how one travels with a checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.data.files import write_atomically
from megatron_ladder.data.tokenizers.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_ladder.data.tokenizers.plain import ByteTokenizer, NullTokenizer
from megatron_ladder.data.tokenizers.protocol import Tokenizer, read_json_object
from megatron_ladder.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_ladder.errors import UserError

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "HFTokenizer",
    "GPT2BPETokenizer",
    "ByteTokenizer",
    "NullTokenizer",
]
"""Values of --tokenizer-type: three names of the first kind, two of the second."""

KINDS: dict[str, str] = {
    "SentencePieceTokenizer": SentencePieceTokenizer.kind,
    "Llama2Tokenizer": SentencePieceTokenizer.kind,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer.kind,
    "HuggingFaceTokenizer": HuggingFaceTokenizer.kind,
    "HFTokenizer": HuggingFaceTokenizer.kind,
    "GPT2BPETokenizer": GPT2BPETokenizer.kind,
    "ByteTokenizer": ByteTokenizer.kind,
    "NullTokenizer": NullTokenizer.kind,
}
"""--tokenizer-type -> the first of its names."""

WITHOUT_FILES = (ByteTokenizer.kind, NullTokenizer.kind)

DESCRIPTION_FILE = "megatron_ladder_tokenizer.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class TokenizerSource:
    """What a command line says of a tokenizer; small, and hashable."""

    tokenizer_type: str
    """One of TokenizerType."""
    tokenizer_model: Path | None = None
    """--tokenizer-model, or --vocab-file."""
    merge_file: Path | None = None
    """--merge-file, of GPT2BPETokenizer alone."""
    vocab_size: int | None = None
    """--vocab-size, of NullTokenizer alone."""


def load_source(source: TokenizerSource) -> Tokenizer:
    """Raises UserError for an unknown type, one without its flags, and for a file that the type cannot read."""
    if source.tokenizer_type not in KINDS:
        raise UserError(f"--tokenizer-type {source.tokenizer_type}: expected one of {', '.join(KINDS)}")
    kind, model = KINDS[source.tokenizer_type], source.tokenizer_model
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind == NullTokenizer.kind:
        if source.vocab_size is None:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(source.vocab_size)
    if model is None:
        flags = "--vocab-file and --merge-file" if kind == GPT2BPETokenizer.kind else "--tokenizer-model"
        raise UserError(f"--tokenizer-type {source.tokenizer_type} needs {flags}")
    if kind == GPT2BPETokenizer.kind:
        return GPT2BPETokenizer(model, source.merge_file)
    return SentencePieceTokenizer(model) if kind == SentencePieceTokenizer.kind else HuggingFaceTokenizer(model)


def load_tokenizer(tokenizer_type: str, tokenizer_model: Path) -> Tokenizer:
    """A tokenizer that a type and a file name; raises as `load_source`."""
    return load_source(TokenizerSource(tokenizer_type, tokenizer_model))


def source_of(tokenizer: Tokenizer) -> TokenizerSource:
    """What loads an equal tokenizer in another process."""
    if tokenizer.kind in WITHOUT_FILES:
        return TokenizerSource(tokenizer.kind, vocab_size=tokenizer.vocab_size - 1)
    merge_file = tokenizer.files[1] if tokenizer.kind == GPT2BPETokenizer.kind else None
    return TokenizerSource(tokenizer.kind, tokenizer.files[0], merge_file)


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """File name -> content of what a checkpoint keeps of a tokenizer: its files as they were when it was read, and a
    description that finds them again."""
    source = source_of(tokenizer)
    description = {
        "format_version": FORMAT_VERSION,
        "tokenizer_type": tokenizer.kind,
        "file": source.tokenizer_model and source.tokenizer_model.name,
        "merge_file": source.merge_file and source.merge_file.name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
    }
    contents = {file.name: content for file, content in zip(tokenizer.files, tokenizer.contents, strict=True)}
    return contents | {DESCRIPTION_FILE: (json.dumps(description, indent=2) + "\n").encode()}


def copy_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the tokenizer into a directory, from which `load_tokenizer_from_directory` loads it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(tokenizer).items():
        write_atomically(directory / name, content)


def load_tokenizer_from_directory(directory: Path) -> Tokenizer:
    """Loads what `copy_tokenizer` left.

    Raises:
        UserError: when there is none, or its file is not the one that was copied.
    """
    path = directory / DESCRIPTION_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file: {directory} holds no tokenizer")
    description = read_json_object(path)
    missing = {"tokenizer_type", "file", "sha256"} - set(description)
    if missing:
        raise UserError(f"{path}: lacks {', '.join(sorted(missing))}: copy the tokenizer again")
    files = [
        directory / Path(name).name if isinstance(name, str) else None
        for name in (description["file"], description.get("merge_file"))
    ]
    vocab_size = description.get("vocab_size", 2) - 1
    tokenizer = load_source(TokenizerSource(description["tokenizer_type"], files[0], files[1], vocab_size))
    if tokenizer.sha256 != description["sha256"]:
        what = tokenizer.files[0] if tokenizer.files else path
        raise UserError(
            f"{what}: sha256 is {tokenizer.sha256}, {path.name} expects {description['sha256']}: "
            "copy the tokenizer again"
        )
    return tokenizer
