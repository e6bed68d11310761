"""Small tokenizers and data sets of known content, made once per session."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megatron_ladder.data.indexed import IndexedDataset, token_dtype
from megatron_ladder.data.tokenizer_training import train_sentencepiece
from megatron_ladder.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from tests.helpers.tokenizer_copies import train_byte_level
from tests.helpers.tokens import MakeDataset, write_documents

TEXT = Path(tokenizers.__file__).read_text() + Path(np.__file__).read_text()


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    path = tmp_path_factory.mktemp("sentencepiece") / "tiny.model"
    path.write_bytes(train_sentencepiece([TEXT], 600))
    return SentencePieceTokenizer(path)


@pytest.fixture(scope="session")
def hugging_face_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hugging_face")
    tokenizer = train_byte_level([TEXT], 500, ["<|pad|>", "<|end_of_turn|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end_of_turn|>"}}')
    return directory


@pytest.fixture(scope="session")
def hugging_face_tokenizer(hugging_face_directory: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(hugging_face_directory)


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Return a function that makes a data set of documents of the given lengths whose tokens count up from 0."""

    def make(lengths: list[int], name: str = "numbers", vocab_size: int = 100_000) -> IndexedDataset:
        documents = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        return IndexedDataset(write_documents(tmp_path / name, *documents, dtype=token_dtype(vocab_size)))

    return make
