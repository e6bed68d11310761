import base64
import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers

from megatron_ladder.cli import train_tokenizer
from megatron_ladder.data.encoding import Task
from megatron_ladder.data.reading.protocol import Reading
from megatron_ladder.data.tokenizer_training import TRAINERS, train_sentencepiece
from megatron_ladder.errors import UserError
from megatron_ladder.tokenizers.copies import find_tokenizer, load_tokenizer_from_directory
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_ladder.tokenizers.kinds import (
    ByteTokenizer,
    Identity,
    NullTokenizer,
    Tokenizer,
    load_tokenizer,
    same_tokenizer,
)
from megatron_ladder.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.helpers.tokenizer_copies import copy_tokenizer

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


@pytest.fixture(params=["sentencepiece_tokenizer", "hugging_face_tokenizer", None])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ByteTokenizer() if request.param is None else request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", NASTY)
def test_decoding_restores_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= number < tokenizer.vocab_size for number in ids)
    assert bool(ids) == bool(text)


def test_the_end_of_sequence_token_is_found(hugging_face_directory: Path, tmp_path: Path) -> None:
    content = json.loads((hugging_face_directory / "tokenizer.json").read_text())
    library = tokenizers.Tokenizer.from_file(str(hugging_face_directory / "tokenizer.json"))
    assert HuggingFaceTokenizer(hugging_face_directory).eod_id == library.token_to_id("<|end_of_turn|>")

    alone = tmp_path / "tokenizer.json"
    alone.write_text(json.dumps(content))
    with pytest.raises(UserError, match="the end-of-document token is unknown"):
        HuggingFaceTokenizer(alone)
    named = HuggingFaceTokenizer(alone, "el")
    copy_tokenizer(named, tmp_path / "copy")
    assert named.eod_id == library.token_to_id("el")
    for copy in (load_tokenizer_from_directory(tmp_path / "copy"), pickle.loads(pickle.dumps(named))):
        assert copy.eod_id == named.eod_id
    with pytest.raises(UserError, match="--eod-token <nowhere>: is not in the vocabulary of "):
        HuggingFaceTokenizer(alone, "<nowhere>")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "el"}')
    assert HuggingFaceTokenizer(alone).eod_id == library.token_to_id("el")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')
    with pytest.raises(UserError, match="tokenizer_config.json: eos_token '<nowhere>' is not in the vocabulary"):
        HuggingFaceTokenizer(alone)
    for companion in ("special_tokens_map.json", "tokenizer_config.json"):
        (tmp_path / companion).unlink()
    content["added_tokens"][0]["content"] = "<|endoftext|>"
    content["model"]["vocab"]["<|endoftext|>"] = content["model"]["vocab"].pop("<|pad|>")
    alone.write_text(json.dumps(content))
    assert HuggingFaceTokenizer(alone).eod_id == 0


def test_a_copied_tokenizer_equals_the_original(tokenizer: Tokenizer, tmp_path: Path) -> None:
    copy_tokenizer(tokenizer, tmp_path / "checkpoint")
    moved = (tmp_path / "checkpoint").rename(tmp_path / "moved")
    loaded = load_tokenizer_from_directory(moved)
    assert {file.parent for file in loaded.files} <= {moved}
    for name in ("kind", "sha256", "vocab_size", "eod_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    assert loaded.encode(NASTY[5]) == tokenizer.encode(NASTY[5])


def test_a_changed_copy_is_rejected(sentencepiece_tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    copy_tokenizer(sentencepiece_tokenizer, tmp_path)
    (tmp_path / "tiny.model").write_bytes(train_sentencepiece(["other words entirely"], 275))
    with pytest.raises(UserError, match=r"tiny\.model: sha256 is"):
        load_tokenizer_from_directory(tmp_path)
    (tmp_path / "megatron_ladder_tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="format_version: found nothing, expected 1: copy the tokenizer again"):
        load_tokenizer_from_directory(tmp_path)
    with pytest.raises(UserError, match="contains no tokenizer"):
        load_tokenizer_from_directory(tmp_path / "nowhere")


def test_invalid_tokenizer_files(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.model"
    wrong.write_bytes(b"not a model" * 30)
    for kind in ("SentencePieceTokenizer", "HFTokenizer"):
        for path, reason in ((wrong, "not a"), (tmp_path, "is a directory|no such file"), (tmp_path / "x", "no such")):
            with pytest.raises(UserError, match=rf"--tokenizer-model .*: {reason}"):
                load_tokenizer(kind, path)


def test_the_null_tokenizer_reads_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.encode_documents(["5 99\n0", ""], False) == [[5, 99, 0], []]
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (100, 101)
    assert tokenizer.decode([5, 99, 100]) == "5 99"
    for word in ("100", "-1", "x"):
        with pytest.raises(UserError, match=f"'{word}' found, expected 0 to 99"):
            tokenizer.encode(f"1 {word}")
    copy_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer_from_directory(tmp_path).sha256 == tokenizer.sha256 != NullTokenizer(99).sha256


def test_trained_byte_pairs_include_line_feeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("def f():\n        return 1\n\n" * 200)
    command = f"--input {tmp_path}/*.txt --model-prefix {tmp_path}/m --vocab-size 275 --model-type bpe".split()
    train_tokenizer.main(command)
    assert "training 275 pieces on 5.40 kB of 5.40 kB\n" in capsys.readouterr().out
    tokenizer = load_tokenizer("HFTokenizer", tmp_path / "m.json")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (275, 0)
    assert len(tokenizer.encode(":\n       ")) <= 2
    with pytest.raises(UserError, match="--vocab-size 9000: too high for these texts, which give"):
        train_tokenizer.main([*command, "--vocab-size", "9000"])
    with pytest.raises(UserError, match="--vocab-size 256: expected 257 or more"):
        TRAINERS["bpe"].train(["a"], 256)


def test_the_ids_are_those_of_the_libraries(
    sentencepiece_tokenizer: SentencePieceTokenizer, hugging_face_tokenizer: HuggingFaceTokenizer
) -> None:
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_tokenizer.files[0]))
    library = tokenizers.Tokenizer.from_file(str(hugging_face_tokenizer.files[0]))
    texts = [*NASTY, "<|pad|><|end_of_turn|> a▁ ▁▁b I'LL don't", Path(tokenizers.__file__).read_text()]
    used: Sequence[tuple[Tokenizer, Callable[[str], list[int]]]] = (
        (sentencepiece_tokenizer, pieces.encode),
        (hugging_face_tokenizer, lambda text: library.encode(text, add_special_tokens=False).ids),
    )
    for tokenizer, encode in used:
        for end in ([], [tokenizer.eod_id]):
            expected = [encode(text) + end for text in texts if text]
            (found,) = Task(tokenizer, Reading(), bool(end), parse_special_tokens=True).encode(
                [[text] for text in texts]
            )
            assert found.token_ids.dtype == np.dtype("<u2") and found.token_ids.tolist() == sum(expected, [])
            assert found.lengths.tolist() == list(map(len, expected))


def test_a_file_of_tiktoken_is_recognised(tmp_path: Path) -> None:
    lines = (f"{base64.b64encode(bytes([number])).decode()} {number}\n" for number in range(256))
    content = "".join(lines)
    for name in ("tiktoken.model", "tokenizer.model"):
        (tmp_path / name).write_text(content)
    fix = r"is a file of tiktoken, .*AutoTokenizer\.from_pretrained\(.*pass HuggingFaceTokenizer the tokenizer\.json"
    for kind, model in (("HuggingFaceTokenizer", tmp_path), ("SentencePieceTokenizer", tmp_path / "tokenizer.model")):
        with pytest.raises(UserError, match=rf"to\w+\.model: {fix}|tiktoken\.model: {fix}"):
            load_tokenizer(kind, model)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(UserError, match=rf"tiktoken\.model: {fix}"):
        find_tokenizer(tmp_path)


def test_a_file_of_the_other_type_is_recognised(
    tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    (model,) = sentencepiece_tokenizer.files
    with pytest.raises(UserError, match="is a SentencePiece model: use --tokenizer-type SentencePieceTokenizer$"):
        load_tokenizer("HuggingFaceTokenizer", model)
    (tmp_path / "tokenizer.json").write_bytes(sentencepiece_tokenizer.as_json())
    with pytest.raises(UserError, match="not a SentencePiece model: is JSON: use --tokenizer-type HuggingFaceTokeniz"):
        load_tokenizer("SentencePieceTokenizer", tmp_path / "tokenizer.json")
    (tmp_path / "cut").write_bytes(model.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cut: not a SentencePiece model$"):
        load_tokenizer("SentencePieceTokenizer", tmp_path / "cut")
    with pytest.raises(UserError, match=r"cut: not a tokenizer\.json: is not JSON"):
        load_tokenizer("HuggingFaceTokenizer", tmp_path / "cut")
    assert capfd.readouterr() == ("", "")


def test_two_formats_in_one_directory_are_one_tokenizer(
    tmp_path: Path, sentencepiece_tokenizer: SentencePieceTokenizer, hugging_face_directory: Path
) -> None:
    """An unrelated tokenizer.json, as `train_tokenizer.py --model-type bpe` writes it, is another one."""
    (pieces,) = sentencepiece_tokenizer.contents
    as_json = sentencepiece_tokenizer.as_json()
    other_json = (hugging_face_directory / "tokenizer.json").read_bytes()
    lower_case = json.dumps({**json.loads(as_json), "normalizer": {"type": "Lowercase"}}).encode()

    def identities(name: str, content: bytes, eos_token: str = "</s>") -> list[Identity]:
        """Return those of tokenizer.model and tokenizer.json in one directory."""
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(pieces)
        (folder / "tokenizer.json").write_bytes(content)
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": eos_token}))
        loaded = (load_tokenizer("Llama2Tokenizer", folder / "tokenizer.model"), load_tokenizer("HFTokenizer", folder))
        return [tokenizer.identity for tokenizer in loaded]

    model, converted = (hashlib.sha256(content).hexdigest() for content in (pieces, as_json))
    of_model, of_json = identities("both", as_json)
    assert of_model == (model, converted) and of_json == (converted, model)
    assert sentencepiece_tokenizer.identity == model
    for known in (of_model, of_json, model, converted):
        assert same_tokenizer(of_json, known) and same_tokenizer(known, of_json)
    unrelated = identities("unrelated", other_json, "<|end_of_turn|>")
    assert unrelated == [model, hashlib.sha256(other_json).hexdigest()]
    assert not same_tokenizer(*unrelated)
    # The vocabulary is the same, and the texts are not.
    _, changed = identities("changed", lower_case)
    assert not same_tokenizer(changed, of_json)
