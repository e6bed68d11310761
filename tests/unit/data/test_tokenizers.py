import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from megatron_ladder.data.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    copy_tokenizer,
    load_tokenizer,
    load_tokenizer_from_directory,
    train_sentencepiece,
)
from megatron_ladder.errors import UserError

NASTY = [
    "",
    " ",
    "\n",
    "\tif x:\r\n\t\treturn  1\n\n    # done \n",
    "  two leading, two trailing  ",
    "héllo wörld — 日本語 🎉🏽 e\u0301",
    "\x00\x01\x7f\u2028\ufeff\x0c",
    "<s> </s> <unk> <0x0A> <|pad|",
    "ﬁ ① Å \u00a0 \u3000",  # what NFKC would change
    "x = 1234567890" * 50,
]


@pytest.fixture(params=["sentencepiece_tokenizer", "hugging_face_tokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", NASTY)
def test_text_comes_back_as_it_was(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= number < tokenizer.vocab_size for number in ids)
    assert bool(ids) == bool(text)


def test_batch_equals_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(NASTY) == [tokenizer.encode(text) for text in NASTY]
    assert tokenizer.encode_batch([]) == []


def test_text_without_its_end_can_be_read(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🎉")
    shown = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    assert shown[0] == "" and shown[-1] == "ab🎉"
    assert all(text.rstrip("\ufffd") in ("", "a", "ab") for text in shown[:-1])
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == "ab🎉"


def test_ids_are_those_of_the_libraries(
    sentencepiece_tokenizer: SentencePieceTokenizer, hugging_face_directory: Path
) -> None:
    text = NASTY[3] + NASTY[5]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_tokenizer.files[0]))
    assert sentencepiece_tokenizer.encode(text) == processor.encode(text)
    assert [processor.id_to_piece(number) for number in sentencepiece_tokenizer.encode("x")] == ["x"]
    assert sentencepiece_tokenizer.vocab_size == 600
    assert sentencepiece_tokenizer.eod_id == processor.eos_id() == 2
    library = tokenizers.Tokenizer.from_file(str(hugging_face_directory / "tokenizer.json"))
    assert HuggingFaceTokenizer(hugging_face_directory).encode(text) == library.encode(text).ids


def test_training_is_deterministic() -> None:
    text = [Path(json.__file__).read_text()]
    assert train_sentencepiece(text, 400) == train_sentencepiece(text, 400)


@pytest.mark.parametrize(
    ("texts", "vocab_size", "reason"),
    [
        (["abc"], 100, "required_chars"),
        (["abc"], 5000, "too high"),
        ([], 300, "no text"),
        ([""], 300, "no text"),
    ],
)
def test_vocabulary_that_does_not_fit_the_text(texts: list[str], vocab_size: int, reason: str) -> None:
    with pytest.raises(UserError, match=rf"--vocab-size {vocab_size}: .*{reason}"):
        train_sentencepiece(texts, vocab_size)


def test_end_of_sequence_is_found_where_it_is_named(hugging_face_directory: Path, tmp_path: Path) -> None:
    content = json.loads((hugging_face_directory / "tokenizer.json").read_text())
    library = tokenizers.Tokenizer.from_file(str(hugging_face_directory / "tokenizer.json"))
    assert HuggingFaceTokenizer(hugging_face_directory).eod_id == library.token_to_id("<|end_of_turn|>")

    alone = tmp_path / "tokenizer.json"
    alone.write_text(json.dumps(content))
    with pytest.raises(UserError, match="which token ends a document is not known"):
        HuggingFaceTokenizer(alone)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "el"}')
    assert HuggingFaceTokenizer(alone).eod_id == library.token_to_id("el")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')
    with pytest.raises(
        UserError, match="tokenizer_config.json: eos_token '<nowhere>' is not in the vocabulary"
    ):
        HuggingFaceTokenizer(alone)
    for companion in ("special_tokens_map.json", "tokenizer_config.json"):
        (tmp_path / companion).unlink()
    content["added_tokens"][0]["content"] = "<|endoftext|>"
    content["model"]["vocab"]["<|endoftext|>"] = content["model"]["vocab"].pop("<|pad|>")
    alone.write_text(json.dumps(content))
    assert HuggingFaceTokenizer(alone).eod_id == 0


def test_truncation_and_padding_of_the_file_are_ignored(hugging_face_directory: Path, tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(hugging_face_directory / "tokenizer.json"))
    expected = library.encode(NASTY[3]).ids
    library.enable_truncation(4)
    library.enable_padding(length=4)
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_turn|>"}')
    assert HuggingFaceTokenizer(tmp_path).encode_batch([NASTY[3], ""]) == [expected, []]


def test_tokenizer_travels_with_a_checkpoint(tokenizer: Tokenizer, tmp_path: Path) -> None:
    copy_tokenizer(tokenizer, tmp_path / "checkpoint")
    moved = (tmp_path / "checkpoint").rename(tmp_path / "moved")
    loaded = load_tokenizer_from_directory(moved)
    assert loaded.files[0].parent == moved
    assert (loaded.kind, loaded.sha256, loaded.vocab_size, loaded.eod_id) == (
        tokenizer.kind,
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.eod_id,
    )
    assert loaded.encode(NASTY[5]) == tokenizer.encode(NASTY[5])


def test_a_copy_that_was_exchanged_is_refused(
    sentencepiece_tokenizer: SentencePieceTokenizer, tmp_path: Path
) -> None:
    copy_tokenizer(sentencepiece_tokenizer, tmp_path)
    (tmp_path / "tiny.model").write_bytes(train_sentencepiece(["other words entirely"], 275))
    with pytest.raises(UserError, match=r"tiny\.model: sha256 is"):
        load_tokenizer_from_directory(tmp_path)
    (tmp_path / "megatron_ladder_tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="lacks file, sha256, tokenizer_type"):
        load_tokenizer_from_directory(tmp_path)
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer_from_directory(tmp_path / "nowhere")


def test_all_names_of_a_type(
    sentencepiece_tokenizer: SentencePieceTokenizer, hugging_face_directory: Path
) -> None:
    for name in ("SentencePieceTokenizer", "Llama2Tokenizer", "GPTSentencePieceTokenizer"):
        assert isinstance(load_tokenizer(name, sentencepiece_tokenizer.files[0]), SentencePieceTokenizer)
    for name in ("HuggingFaceTokenizer", "HFTokenizer"):
        assert isinstance(
            load_tokenizer(name, hugging_face_directory / "tokenizer.json"), HuggingFaceTokenizer
        )
    with pytest.raises(UserError, match="--tokenizer-type Morse: expected one of SentencePieceTokenizer"):
        load_tokenizer("Morse", hugging_face_directory)


def test_files_that_are_none(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.model"
    wrong.write_bytes(b"not a model" * 30)
    for kind in ("SentencePieceTokenizer", "HFTokenizer"):
        for path, reason in (
            (wrong, "not a"),
            (tmp_path, "is a directory|no such file"),
            (tmp_path / "x", "no such"),
        ):
            with pytest.raises(UserError, match=rf"--tokenizer-model .*: {reason}"):
                load_tokenizer(kind, path)
