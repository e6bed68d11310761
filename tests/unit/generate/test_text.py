"""Incremental decoding: whole characters, no lost spaces, and pieces that join to the text."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_ladder.data.tokenizers import HuggingFaceTokenizer
from megatron_ladder.generate.slots import IncrementalDecoder, StopFinder
from tests.unit.generate.plain_tokenizers import Bytes, Words
from tests.unit.generate.tiny_model import train_tokenizer

TEXT = "def größe(x):\n    return '日本 🙂🙂'  # Ωmega  \n"


def pieces_of(decoder: IncrementalDecoder, ids: Sequence[int]) -> list[str]:
    return [*(decoder.push(number) for number in ids), decoder.finish()]


def test_bytes_are_joined_to_whole_characters() -> None:
    decoder = IncrementalDecoder(Bytes(), [])
    pieces = pieces_of(decoder, Bytes().encode("aß🙂!"))
    assert pieces == ["a", "", "ß", "", "", "", "🙂", "!", ""]


def test_an_incomplete_character_is_shown_at_the_end() -> None:
    decoder = IncrementalDecoder(Bytes(), [])
    assert pieces_of(decoder, [*b"ok", 0xF0, 0x9F]) == ["o", "k", "", "", "\ufffd"]


def test_a_character_that_begins_in_the_prompt_is_completed() -> None:
    assert pieces_of(IncrementalDecoder(Bytes(), [ord("a"), 0xC3]), [0x9F, ord("b")]) == ["ß", "b", ""]


@pytest.mark.parametrize("prompt", ["caf\ufffd", "\ufffd\ufffd"])
@pytest.mark.parametrize("continuation", ["abc", "é!", "\ufffdz", "\ufffd"])
def test_a_prompt_that_ends_in_a_replacement_character_is_not_repeated(prompt: str, continuation: str) -> None:
    decoder = IncrementalDecoder(Bytes(), list(prompt.encode()))
    assert "".join(pieces_of(decoder, list(continuation.encode()))) == continuation


def test_the_space_before_a_word_is_kept() -> None:
    assert pieces_of(IncrementalDecoder(Words(), [1, 2]), [3, 4]) == [" w3", " w4", ""]
    assert pieces_of(IncrementalDecoder(Words(), [7] * 30), [3] * 30) == [" w3"] * 30 + [""]
    assert pieces_of(IncrementalDecoder(Words(), []), [3, 4]) == ["w3", " w4", ""]


def test_control_tokens_have_no_text_and_remove_no_space() -> None:
    assert pieces_of(IncrementalDecoder(Words(), [1]), [3, 0, 0, 4]) == [" w3", "", "", " w4", ""]


@pytest.mark.parametrize("cut", [0, 7])
def test_sentencepiece_pieces_join_to_the_text(tmp_path: Path, cut: int) -> None:
    tokenizer = train_tokenizer(tmp_path, ["def size(x):\n    return x  # mega\n"] * 20)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    pieces = pieces_of(IncrementalDecoder(tokenizer, ids[:cut]), ids[cut:])
    assert tokenizer.decode(ids[:cut]).rstrip("\ufffd") + "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_byte_level_bpe_pieces_join_to_the_text(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "</s>"])}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    pieces = pieces_of(IncrementalDecoder(tokenizer, tokenizer.encode("x ")), tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["ab", "c", "de"], ("cd",), ["ab", "", ""]),
        (["ab", "c", "xe"], ("cd",), ["ab", "", "cxe"]),
        (["a\n", "\nb"], ("\n\n",), ["a", ""]),
        (["xEN", "EN", "D!"], ("END", "ENEND"), ["x", "", ""]),
        (["one END two"], ("two", "END"), ["one "]),
        (["aab"], ("ab",), ["a"]),
        (["x", "y"], (), ["x", "y"]),
    ],
)
def test_a_possible_beginning_of_a_stop_string_is_held_back(
    pieces: list[str], stops: tuple[str, ...], shown: list[str]
) -> None:
    finder = StopFinder(stops)
    assert [finder.push(piece) for piece in pieces] == shown
    assert finder.stopped == any(stop in "".join(pieces) for stop in stops)
    assert finder.push("more") == ("" if finder.stopped else "more")
