"""Pieces of text: whole characters, no lost blanks, and together the whole text."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_ladder.data.tokenizers import HuggingFaceTokenizer
from megatron_ladder.generate.text import StopFinder, TextStream
from tests.unit.generate.plain_tokenizers import Bytes, Words
from tests.unit.generate.tiny_model import train_tokenizer

TEXT = "def größe(x):\n    return '日本 🙂🙂'  # Ωmega  \n"


def pieces_of(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*(stream.push(number) for number in ids), stream.finish()]


def test_bytes_come_as_whole_characters() -> None:
    stream = TextStream(Bytes(), [])
    pieces = pieces_of(stream, Bytes().encode("aß🙂!"))
    assert pieces == ["a", "", "ß", "", "", "", "🙂", "!", ""]


def test_a_character_that_stays_incomplete_is_shown_at_the_end() -> None:
    stream = TextStream(Bytes(), [])
    assert pieces_of(stream, [*b"ok", 0xF0, 0x9F]) == ["o", "k", "", "", "\ufffd"]


def test_a_byte_that_begins_no_character_is_shown_with_the_next() -> None:
    assert pieces_of(TextStream(Bytes(), []), [0x80, ord("a")]) == ["", "\ufffda", ""]


def test_a_character_that_the_prompt_began_is_completed() -> None:
    assert pieces_of(TextStream(Bytes(), [ord("a"), 0xC3]), [0x9F, ord("b")]) == ["ß", "b", ""]


def test_the_blank_before_a_word_is_kept() -> None:
    assert pieces_of(TextStream(Words(), [1, 2]), [3, 4]) == [" w3", " w4", ""]
    assert pieces_of(TextStream(Words(), [7] * 30), [3] * 30) == [" w3"] * 30 + [""]
    assert pieces_of(TextStream(Words(), []), [3, 4]) == ["w3", " w4", ""]


def test_control_tokens_have_no_text_and_cost_no_blank() -> None:
    assert pieces_of(TextStream(Words(), [1]), [3, 0, 0, 4]) == [" w3", "", "", " w4", ""]


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert pieces_of(TextStream(Bytes(), [300, 97]), [300, 98, 256]) == ["", "b", "", ""]


@pytest.mark.parametrize("cut", [0, 1, 7, 12])
def test_pieces_of_sentencepiece_are_the_text(tmp_path: Path, cut: int) -> None:
    tokenizer = train_tokenizer(tmp_path, ["def size(x):\n    return x  # mega\n"] * 20)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    pieces = pieces_of(TextStream(tokenizer, ids[:cut]), ids[cut:])
    assert tokenizer.decode(ids[:cut]).rstrip("\ufffd") + "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_pieces_of_byte_level_bpe_are_the_text(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "</s>"])}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    pieces = pieces_of(TextStream(tokenizer, tokenizer.encode("x ")), tokenizer.encode(TEXT))
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
def test_what_may_begin_a_stop_string_is_held_back(pieces: list[str], stops: tuple[str, ...], shown: list[str]) -> None:
    finder = StopFinder(stops)
    assert [finder.push(piece) for piece in pieces] == shown
    assert finder.stopped == any(stop in "".join(pieces) for stop in stops)
    assert finder.push("more") == ("" if finder.stopped else "more")


def test_what_was_held_back_is_shown_in_the_end() -> None:
    finder = StopFinder(("END",))
    assert finder.push("the EN") == "the "
    assert (finder.finish(), finder.finish()) == ("EN", "")
