"""The copy of a tokenizer in the directory of a model."""

import json
from pathlib import Path
from typing import Literal

import msgspec

from megatron_ladder.errors import UserError
from megatron_ladder.files import read_if_exists
from megatron_ladder.tokenizers.kinds import TIKTOKEN_FILE, TOKENIZER_KINDS, Tokenizer, load_tokenizer
from megatron_ladder.typed import read_json, typed

DESCRIPTION_FILE = "megatron_ladder_tokenizer.json"


class _Description(msgspec.Struct):
    """The content of DESCRIPTION_FILE."""

    format_version: Literal[1]
    tokenizer_type: str
    file: str | None
    sha256: str
    vocab_size: int


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return file names and contents for a copy of the tokenizer: its files as loaded, and a description of them."""
    model = tokenizer.files[0].name if tokenizer.files else None
    description = _Description(1, tokenizer.kind, model, tokenizer.sha256, tokenizer.vocab_size)
    contents = {file.name: content for file, content in zip(tokenizer.files, tokenizer.contents, strict=True)}
    return contents | {DESCRIPTION_FILE: (json.dumps(msgspec.to_builtins(description), indent=2) + "\n").encode()}


def find_tokenizer(directory: Path) -> Tokenizer | None:
    """Load the tokenizer of a model's directory: the described one, or else the first of Hugging Face's files."""
    if (directory / DESCRIPTION_FILE).exists():
        return load_tokenizer_from_directory(directory)
    for kind in TOKENIZER_KINDS:
        for path in map(directory.joinpath, kind.files):
            if path.exists():
                return kind.load(path)
    # Raises an error that names the way to convert it.
    return load_tokenizer("HuggingFaceTokenizer", directory) if (directory / TIKTOKEN_FILE).exists() else None


def load_tokenizer_from_directory(directory: Path) -> Tokenizer:
    """Load a copy that consists of `tokenizer_files`; raises UserError if it is missing or its files have changed."""
    path = directory / DESCRIPTION_FILE
    content = read_if_exists(path)
    if content is None:
        raise UserError(f"{path}: no such file: {directory} contains no tokenizer")
    try:
        description = typed(read_json(content), _Description)
    except ValueError as error:
        raise UserError(f"{path}: {error}: copy the tokenizer again") from None
    model = directory / Path(description.file).name if description.file else None
    tokenizer = load_tokenizer(description.tokenizer_type, model, description.vocab_size - 1)
    if tokenizer.sha256 != description.sha256:
        changed = tokenizer.files[0] if tokenizer.files else path
        raise UserError(
            f"{changed}: sha256 is {tokenizer.sha256}, {path.name} expects {description.sha256}: "
            "copy the tokenizer again"
        )
    return tokenizer
