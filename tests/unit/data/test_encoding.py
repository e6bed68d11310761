import io
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from numpy.typing import NDArray

from megatron_ladder.data import encoding
from megatron_ladder.data.encoding import (
    _HARD_TEXTS,
    UnsupportedTokenizerError,
    _GigatokenEncoder,
    _join,
    choose_encoder,
    make_encoder,
)
from megatron_ladder.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from megatron_ladder.errors import UserError

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
RANDOM = np.random.default_rng(3)
RANGES = [(0, 33), (32, 127), (32, 127), (0x80, 0x500), (0x2000, 0x2100), (0x4E00, 0x4F00), (0x1F300, 0x1F700)]
RANDOM_TEXTS = [
    "".join(chr(RANDOM.integers(*RANGES[place])) for place in RANDOM.integers(len(RANGES), size=40)) for _ in range(300)
]
TEXTS = [*_HARD_TEXTS, *RANDOM_TEXTS, Path(tokenizers.__file__).read_text(), Path(np.__file__).read_text()]

Change = Callable[[dict[str, Any]], object]


def changed(directory: Path, folder: Path, change: Change) -> HuggingFaceTokenizer:
    """Return the tokenizer with a modified tokenizer.json."""
    values = json.loads((directory / "tokenizer.json").read_text())
    change(values)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text((directory / "tokenizer_config.json").read_text())
    return HuggingFaceTokenizer(folder)


def split_by(pattern: str) -> Change:
    def change(values: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytewise]}

    return change


@pytest.mark.parametrize("change", [lambda values: None, split_by(LLAMA3_PATTERN)], ids=["gpt2", "llama3"])
def test_gigatoken_gives_the_ids_of_tokenizers(hugging_face_directory: Path, tmp_path: Path, change: Change) -> None:
    tokenizer = changed(hugging_face_directory, tmp_path, change)
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = [plain.encode(text, add_special_tokens=False).ids for text in TEXTS]
    encoder = make_encoder(tokenizer, "gigatoken")
    assert [ids.tolist() for ids in encoder.encode(TEXTS)] == expected
    choice = choose_encoder(tokenizer, "auto", TEXTS)
    assert choice.encoder.library == "gigatoken" and "its ids equal those of tokenizers" in choice.sentence


def test_gigatoken_gives_the_ids_of_sentencepiece(sentencepiece_tokenizer: SentencePieceTokenizer) -> None:
    spelled = ["<s>a</s><unk><0x0A>", "<s><s", "a<0x41>"]
    encoder = make_encoder(sentencepiece_tokenizer, "gigatoken")
    expected = sentencepiece_tokenizer.encode_batch([*TEXTS, *spelled])
    assert [ids.tolist() for ids in encoder.encode([*TEXTS, *spelled])] == expected
    assert choose_encoder(sentencepiece_tokenizer, "auto", TEXTS).encoder.library == "gigatoken"


def test_no_merge_makes_a_control_piece(tmp_path: Path) -> None:
    """Test this for pieces of which both halves are in the vocabulary."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a<b s> c 0x41> abc"] * 50),
        model_writer=model,
        model_type="bpe",
        vocab_size=275,
        byte_fallback=True,
        user_defined_symbols=["s>", "0x41>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "m.model").write_bytes(model.getvalue())
    tokenizer = SentencePieceTokenizer(tmp_path / "m.model")
    values = json.loads(encoding._sentencepiece_json(tokenizer))
    assert {"<", "s>", "0x41>"} <= set(values["model"]["vocab"])
    made = {left + right for left, right in values["model"]["merges"]}
    assert not made & {"<s>", "</s>", "<unk>", "<0x41>"}
    assert [token["content"] for token in values["added_tokens"]] == ["s>", "0x41>"]


class Wrong:
    """Returns different ids for one text of the input."""

    library = "gigatoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.array(self._tokenizer.encode(text)) + (text == "rare") for text in texts]


def test_different_ids_fall_back_to_the_reference(
    hugging_face_tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_GigatokenEncoder", Wrong)
    assert choose_encoder(hugging_face_tokenizer, "auto", ["common"]).encoder.library == "gigatoken"
    choice = choose_encoder(hugging_face_tokenizer, "auto", ["common", "rare"])
    assert choice.encoder.library == "tokenizers"
    assert choice.sentence == "tokenizers encodes (gigatoken: its ids differ from those of tokenizers for 'rare')"
    with pytest.raises(UserError, match="--tokenizer-library gigatoken: its ids differ from those of tokenizers"):
        choose_encoder(hugging_face_tokenizer, "gigatoken", ["rare"])
    assert choose_encoder(hugging_face_tokenizer, "tokenizers", ["rare"]).encoder.library == "tokenizers"


def test_a_library_that_does_not_support_a_tokenizer(sentencepiece_tokenizer: SentencePieceTokenizer) -> None:
    with pytest.raises(UserError, match="--tokenizer-library tokenizers: does not support SentencePieceTokenizer"):
        choose_encoder(sentencepiece_tokenizer, "tokenizers", [])
    assert choose_encoder(ByteTokenizer(), "auto", []).sentence == "ByteTokenizer encodes"


def test_a_missing_library_falls_back_to_the_reference(
    hugging_face_tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(UnsupportedTokenizerError, match=r"not installed \(pip install gigatoken"):
        make_encoder(hugging_face_tokenizer, "gigatoken")
    choice = choose_encoder(hugging_face_tokenizer, "auto", TEXTS)
    assert choice.encoder.library == "tokenizers" and "tokenizers encodes (gigatoken: not installed" in choice.sentence


def test_the_cache_of_words_is_bounded(
    hugging_face_tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_CHECK_CHARACTERS", 1000)
    encoder = _GigatokenEncoder(hugging_face_tokenizer)
    loads: list[int] = []
    begin = encoder._load
    monkeypatch.setattr(encoder, "_load", lambda: (loads.append(1), begin()))
    resident = [0]

    class Memory:
        def memory_info(self) -> Any:
            return type("", (), {"rss": resident[0]})

    monkeypatch.setattr(encoder, "_process", Memory())
    begin()
    expected = next(encoder.encode(["word " * 300])).tolist()
    assert not loads
    resident[0] = encoding._CACHE_BYTES + 1
    assert next(encoder.encode(["word " * 300])).tolist() == expected and len(loads) == 1
    assert next(encoder.encode(["word " * 300])).tolist() == expected and len(loads) == 1


def test_documents_are_joined_with_their_ends() -> None:
    documents = [np.array(ids, np.uint32) for ids in ([5, 6], [], [7])]
    joined = _join(documents, 9, np.dtype("<u2"))
    assert (joined.token_ids.tolist(), joined.lengths.tolist(), joined.largest_id) == ([5, 6, 9, 7, 9], [3, 2], 9)
    assert joined.token_ids.dtype == np.dtype("<u2")
    assert _join(documents, None, np.dtype("<i4")).token_ids.tolist() == [5, 6, 7]
    assert _join(documents[1:2], 9, np.dtype("<u2")).lengths.tolist() == []
    with pytest.raises(ValueError, match="token id 70000 does not fit uint16"):
        _join([np.array([70_000], np.uint32)], None, np.dtype("<u2"))


@pytest.mark.parametrize("end", [None, 9])
@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
@pytest.mark.parametrize("last", [0, 7, 8, 9])
def test_documents_are_joined_in_blocks(
    monkeypatch: pytest.MonkeyPatch, end: int | None, dtype: str, last: int
) -> None:
    """Test lengths from 0 to several blocks, which end inside, at the end and one after the end of a block."""
    monkeypatch.setattr(encoding, "_BLOCK_TOKENS", 8)
    lengths = [3, 4, 0, 7, 1, 8, 6, 30, 16, 1, 1, 1, 1, 1, last]
    whole = np.random.default_rng(last).integers(0, 60_000, sum(lengths), np.uint32)
    documents = np.split(whole, np.cumsum(lengths)[:-1])
    expected = [token for ids in documents if len(ids) for token in (*ids.tolist(), *([] if end is None else [end]))]
    joined = _join(iter(documents), end, np.dtype(dtype))
    assert joined.token_ids.tolist() == expected and joined.token_ids.dtype == np.dtype(dtype)
    assert joined.lengths.tolist() == [length + (end is not None) for length in lengths if length]
    assert joined.lengths.dtype == np.int32 and joined.largest_id == max(expected)


@pytest.mark.parametrize(("dtype", "most"), [("<u2", (1 << 16) - 1), ("<i4", (1 << 31) - 1)])
def test_the_largest_id_of_a_type_fits_and_no_other(monkeypatch: pytest.MonkeyPatch, dtype: str, most: int) -> None:
    monkeypatch.setattr(encoding, "_BLOCK_TOKENS", 8)
    for place in (0, 7, 8, 20):
        ids = np.arange(21, dtype=np.uint32)
        ids[place] = most
        joined = _join([ids], None, np.dtype(dtype))
        assert joined.token_ids.tolist() == ids.tolist() and joined.largest_id == most
        ids[place] += 1
        with pytest.raises(ValueError, match=f"token id {most + 1} does not fit"):
            _join([ids], None, np.dtype(dtype))


def test_ids_are_freed_document_by_document() -> None:
    alive = [weakref.ref(np.empty(0))]

    def encoded() -> Iterator[NDArray[np.uint32]]:
        for size in range(1, 9):
            ids = np.arange(size, dtype=np.uint32)
            alive.append(weakref.ref(ids))
            yield ids
            del ids
            assert sum(ref() is not None for ref in alive) <= 1

    assert _join(encoded(), None, np.dtype("<u2")).lengths.tolist() == list(range(1, 9))
