"""Files next to the weights, as read by the libraries that use them."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from megatron_ladder.checkpoint.format import Checkpoint
from megatron_ladder.data.tokenizers import (
    ByteTokenizer,
    GPT2BPETokenizer,
    Tokenizer,
    load_tokenizer,
    load_tokenizer_from_directory,
)
from tests.helpers.tokenizer_copies import copy_tokenizer
from tests.unit.convert.hand_made import write_directory
from tests.unit.convert.saved_models import convert
from tests.unit.generate.tiny_model import train_tokenizer, write_checkpoint_with_tokenizer

TEXTS = ["def add(a, b):\n    return a + b\n", "  two  blanks\t", "\u6f22 12", " class"]


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect questions on the terminal; nobody answers them."""
    asked: list[str] = []

    def ask(question: str = "") -> str:
        asked.append(question)
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    return asked


def assert_transformers_loads(directory: Path, ours: Tokenizer, texts: list[str], questions: list[str]) -> None:
    """Load an exported tokenizer in both documented ways, neither of which asks, and compare its ids with ours."""
    trusted = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    without_code = PreTrainedTokenizerFast.from_pretrained(directory)
    assert not questions
    for loaded in (trusted, without_code):
        for text in texts:
            assert loaded.encode(text) == ours.encode(text)
            assert loaded.decode(ours.encode(text)) == text
        assert loaded.eos_token_id == ours.eod_id == GenerationConfig.from_pretrained(directory).eos_token_id


@pytest.mark.parametrize("name", ["tokenizer.model", "other.model"])
def test_transformers_encodes_as_the_sentencepiece_tokenizer(tmp_path: Path, name: str, questions: list[str]) -> None:
    run, _, ours = write_checkpoint_with_tokenizer(tmp_path)
    checkpoint = Checkpoint.open(run).directory
    if name != "tokenizer.model":
        for path in (checkpoint / "tokenizer.model", checkpoint / "megatron_ladder_tokenizer.json"):
            path.unlink()
        renamed = (tmp_path / "tokenizer.model").rename(tmp_path / name)
        copy_tokenizer(load_tokenizer("SentencePieceTokenizer", renamed), checkpoint)
    convert("export", "--load", run, "--hf", tmp_path / "hf")
    assert_transformers_loads(tmp_path / "hf", ours, TEXTS, questions)
    # Transformers asks for code that a tokenizer does not need, and goes on without it.
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").encode(TEXTS[0]) == ours.encode(TEXTS[0])
    assert len(questions) == 1 and "custom code" in questions[0]


def write_word_tokenizer(path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(WordLevel({"<eos>": 0, "a": 1, "b": 2, "[UNK]": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))


def test_tokenizers_of_two_files_and_of_none(tmp_path: Path, questions: list[str]) -> None:
    run, _, _ = write_checkpoint_with_tokenizer(tmp_path)
    checkpoint = Checkpoint.open(run).directory
    for path in checkpoint.glob("*tokenizer*"):
        path.unlink()
    copy_tokenizer(ByteTokenizer(), checkpoint)
    convert("export", "--load", run, "--hf", tmp_path / "bytes")
    assert not list((tmp_path / "bytes").glob("*tokenizer*"))
    vocabulary = {"d": 0, "e": 1, "f": 2, "de": 3, "def": 4, "<|endoftext|>": 5}
    (tmp_path / "words.json").write_text(json.dumps(vocabulary))
    (tmp_path / "pairs.txt").write_text("#version: 0.2\nd e\nde f\n")
    ours = GPT2BPETokenizer(tmp_path / "words.json", tmp_path / "pairs.txt")
    copy_tokenizer(ours, checkpoint)
    convert("export", "--load", run, "--hf", tmp_path / "pairs")
    assert ours.encode("defde") == [4, 3] and ours.eod_id == 5
    assert_transformers_loads(tmp_path / "pairs", ours, ["defde"], questions)
    convert("import", "--hf", tmp_path / "pairs", "--save", tmp_path / "again")
    assert load_tokenizer_from_directory(Checkpoint.open(tmp_path / "again").directory).encode("defde") == [4, 3]


def test_transformers_opens_a_single_tokenizer_file(tmp_path: Path, questions: list[str]) -> None:
    """For example after training with only --tokenizer-model FILE."""
    directory = write_directory(tmp_path / "hf")
    write_word_tokenizer(directory)
    convert("import", "--hf", directory, "--save", tmp_path / "ours", "--ladder-layers", "1")
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back")
    ours = load_tokenizer("HuggingFaceTokenizer", directory / "tokenizer.json")
    assert ours.encode("a b") == [1, 2] and ours.eod_id == 0
    assert_transformers_loads(tmp_path / "back", ours, ["a b"], questions)


def test_an_imported_tokenizer_names_no_code_that_is_not_exported(tmp_path: Path, questions: list[str]) -> None:
    directory = write_directory(tmp_path / "hf")
    write_word_tokenizer(directory)
    config = {"eos_token": "<eos>", "tokenizer_class": "OddTokenizer", "auto_map": {"AutoTokenizer": ["odd.Odd", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    convert("import", "--hf", directory, "--save", tmp_path / "ours")
    convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "back")
    assert_transformers_loads(
        tmp_path / "back", load_tokenizer("HuggingFaceTokenizer", directory / "tokenizer.json"), ["a b"], questions
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "back").encode("b") == [2] and not questions


def test_more_ids_than_the_model_has_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_directory(tmp_path / "hf")
    train_tokenizer(directory, TEXTS[:1] * 40)
    convert("import", "--hf", directory, "--save", tmp_path / "ours", "--dry-run")
    assert "the tokenizer has 300 ids, the model 16" in capsys.readouterr().out
