"""Incremental decoding: whole characters, no lost spaces, and pieces that join to the text."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ladder.generate.slots import IncrementalDecoder, StopFinder
from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_ladder.tokenizers.kinds import ByteTokenizer
from tests.helpers.tokenizer_copies import train_byte_level
from tests.unit.generate.tiny_model import train_tokenizer


class Words(ByteTokenizer):
    """Every id except 0 is a word; words are joined with spaces."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" w{number}" for number in ids if number).removeprefix(" ")


TEXT = "def größe(x):\n    return '日本 🙂🙂'  # Ωmega  \n"


def pieces_of(decoder: IncrementalDecoder, ids: Sequence[int]) -> list[str]:
    return [*(decoder.push(number) for number in ids), decoder.finish()]


SHARP_S = list("ß".encode())


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "ids", "pieces"),
    [
        (ByteTokenizer(), [], list("aß🙂!".encode()), ["a", "", "ß", "", "", "", "🙂", "!", ""]),
        # An incomplete character is shown at the end.
        (ByteTokenizer(), [], [*b"ok", 0xF0, 0x9F], ["o", "k", "", "", "\ufffd"]),
        # A character that begins in the prompt is completed.
        (ByteTokenizer(), [ord("a"), SHARP_S[0]], [SHARP_S[1], ord("b")], ["ß", "b", ""]),
        (Words(), [1, 2], [3, 4], [" w3", " w4", ""]),
        (Words(), [7] * 30, [3] * 30, [" w3"] * 30 + [""]),
        (Words(), [], [3, 4], ["w3", " w4", ""]),
        # Control tokens have no text and remove no space.
        (Words(), [1], [3, 0, 0, 4], [" w3", "", "", " w4", ""]),
    ],
)
def test_whole_characters_and_all_spaces_are_kept(
    tokenizer: ByteTokenizer, prompt: list[int], ids: list[int], pieces: list[str]
) -> None:
    assert pieces_of(IncrementalDecoder(tokenizer, prompt), ids) == pieces


@pytest.mark.parametrize("prompt", ["caf\ufffd", "\ufffd\ufffd"])
@pytest.mark.parametrize("continuation", ["abc", "é!", "\ufffdz", "\ufffd"])
def test_a_prompt_that_ends_in_a_replacement_character_is_not_repeated(prompt: str, continuation: str) -> None:
    decoder = IncrementalDecoder(ByteTokenizer(), list(prompt.encode()))
    assert "".join(pieces_of(decoder, list(continuation.encode()))) == continuation


@pytest.mark.parametrize("cut", [0, 7])
def test_sentencepiece_pieces_join_to_the_text(tmp_path: Path, cut: int) -> None:
    tokenizer = train_tokenizer(tmp_path, ["def size(x):\n    return x  # mega\n"] * 20)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    pieces = pieces_of(IncrementalDecoder(tokenizer, ids[:cut]), ids[cut:])
    assert tokenizer.decode(ids[:cut]).rstrip("\ufffd") + "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_byte_level_bpe_pieces_join_to_the_text(tmp_path: Path) -> None:
    train_byte_level([], 257, ["</s>"]).save(str(tmp_path / "tokenizer.json"))
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


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        (["ab", "<e>"], "<e>", "ab"),
        (["ab", "<e>", "\n", "c"], "<e>\n", "ab"),
        (["ab", "<e>", "c"], "b<e>c", "a"),
        (["a", "<e>", "b"], "<e>x", "ab"),
        (["a", "<s>", "<e>", "b"], "<e>", "a"),
    ],
)
def test_a_stop_string_may_spell_out_control_tokens(pieces: list[str], stop: str, shown: str) -> None:
    """Their spelling is not shown."""
    finder = StopFinder([stop])
    found = [finder.push(piece, hidden=piece.startswith("<")) for piece in pieces]
    assert "".join([*found, finder.finish()]) == shown and finder.stopped == (stop != "<e>x")
