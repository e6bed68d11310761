"""Real text for the data benchmark, what every machine with this program has, and tokenizers that are trained on it.

The sources and documents of Python's standard library and of the installed packages, shuffled by a fixed seed.
"""

import itertools
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ladder.data.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    train_bpe,
    train_sentencepiece,
)

SUFFIXES = frozenset({".md", ".py", ".pyi", ".rst", ".txt"})
LARGEST_TEXT = 1_000_000
"""Longer files are generated tables."""

BPE_VOCABULARY = 32_000
BPE_TEXTS = 1000
SENTENCEPIECE_VOCABULARY = 8_000
SENTENCEPIECE_TEXTS = 300
"""SentencePiece's trainer takes a minute for more."""


def real_texts() -> Iterator[str]:
    """Contents of files in an order that is the same for the same installation."""
    paths = sysconfig.get_paths()
    folders = dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))
    # The packages may lie inside of the library's folder.
    files = list(dict.fromkeys(path for folder in folders for path in sorted(folder.rglob("*"))))
    random.Random(0).shuffle(files)
    for path in files:
        if path.suffix not in SUFFIXES:
            continue
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if 0 < len(text) <= LARGEST_TEXT:
            yield text


def take_texts(megabytes: float) -> list[str]:
    """Real texts of about that size, over again where there are fewer."""
    found: list[str] = []
    size = 0
    for text in real_texts():
        found.append(text)
        size += len(text)
        if size >= megabytes * 1e6:
            return found
    texts = list(found)
    while size < megabytes * 1e6:
        texts.append(found[len(texts) % len(found)])
        size += len(texts[-1])
    return texts


def texts_of(texts: Sequence[str], megabytes: float) -> list[str]:
    """The first texts, of about that size."""
    sizes = itertools.accumulate(map(len, texts))
    return [text for text, size in zip(texts, sizes, strict=True) if size <= megabytes * 1e6] or list(texts[:1])


def write_json_lines(path: Path, texts: Sequence[str]) -> int:
    """Writes an object a text, and returns the size of the file in bytes."""
    with open(path, "wb") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"text": text, "id": number}, ensure_ascii=False).encode() + b"\n")
    return path.stat().st_size


def trained_bpe(folder: Path, texts: Sequence[str]) -> Tokenizer:
    """A tokenizer.json that learnt from some of the texts."""
    path = folder / "tokenizer.json"
    path.write_bytes(train_bpe(texts[:BPE_TEXTS], BPE_VOCABULARY))
    return HuggingFaceTokenizer(path)


def trained_sentencepiece(folder: Path, texts: Sequence[str]) -> Tokenizer:
    """A SentencePiece model that learnt from some of the texts."""
    path = folder / "tokenizer.model"
    path.write_bytes(train_sentencepiece(texts[:SENTENCEPIECE_TEXTS], SENTENCEPIECE_VOCABULARY))
    return SentencePieceTokenizer(path)
