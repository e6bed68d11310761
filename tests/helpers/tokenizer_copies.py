"""Tokenizers: small byte-level ones, and copies, as checkpoints contain them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from megatron_ladder.tokenizers.copies import tokenizer_files
from megatron_ladder.tokenizers.kinds import Tokenizer


def train_byte_level(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer of the library, whose vocabulary begins with the special tokens and all bytes."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def copy_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer to a directory from which `load_tokenizer_from_directory` loads it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(tokenizer).items():
        (directory / name).write_bytes(content)


def write_words(path: Path, *words: str, unknown: str = "[UNK]") -> None:
    """Write the file of a tokenizer whose ids are the numbers of these words."""
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
