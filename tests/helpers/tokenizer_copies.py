"""Copies of tokenizers, as checkpoints contain them."""

from pathlib import Path

from megatron_ladder.data.tokenizers import Tokenizer, tokenizer_files


def copy_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer to a directory from which `load_tokenizer_from_directory` loads it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(tokenizer).items():
        (directory / name).write_bytes(content)
