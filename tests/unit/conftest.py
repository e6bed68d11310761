"""Small tokenizers, made once per session."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megatron_ladder.data.tokenizer_training import train_sentencepiece
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_ladder.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.helpers.tokenizer_copies import train_byte_level

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
