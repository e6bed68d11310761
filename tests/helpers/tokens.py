"""Data sets of made-up tokens, and files of texts."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megatron_ladder.data.indexed import IndexedDataset, IndexedDatasetWriter

MakeDataset = Callable[..., IndexedDataset]
"""The fixture `make_dataset` of the tests of data."""


def write_documents(prefix: Path, *documents: ArrayLike, dtype: DTypeLike = np.uint16) -> Path:
    """Write a data set of these documents; return its prefix."""
    with IndexedDatasetWriter(prefix, np.dtype(dtype)) as writer:
        for tokens in map(np.asarray, documents):
            writer.add_documents(tokens, np.array([len(tokens)], np.int32))
        writer.publish()
    return prefix


def write_tokens(prefix: Path, vocabulary: int = 101, documents: int = 40, seed: int = 0) -> Path:
    """Write a data set of random documents of 50 tokens; return its prefix."""
    random = np.random.default_rng(seed)
    return write_documents(prefix, *(random.integers(0, vocabulary, 50) for _ in range(documents)))


def write_lines(path: Path, texts: Sequence[str]) -> Path:
    """Write JSON lines, compressed if the name ends in .gz."""
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path
