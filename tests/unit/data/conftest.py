"""Data sets of known content."""

from pathlib import Path

import numpy as np
import pytest

from megatron_ladder.data.indexed import IndexedDataset, token_dtype
from tests.helpers.tokens import MakeDataset, write_documents


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Return a function that makes a data set of documents of the given lengths whose tokens count up from 0."""

    def make(lengths: list[int], name: str = "numbers", vocab_size: int = 100_000) -> IndexedDataset:
        documents = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        return IndexedDataset(write_documents(tmp_path / name, *documents, dtype=token_dtype(vocab_size)))

    return make
