"""Texts to ids: the libraries' own ids, joined."""

from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers

from megatron_ladder.data.encoding import Task
from megatron_ladder.data.reading.protocol import Reading
from megatron_ladder.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

HARD_TEXTS = (
    *("", " ", "\n"),
    "  two leading, two trailing  ",
    "I'LL we'll DON'T don't 's 'S 're'Ve it's",
    "1234567890 x=12345 3.14e-10 1,000,000 ٣٤٥ Ⅷ ½",
    "héllo wörld — naïve Ærøskøbing ﬁ ① Å e\u0301",
    "日本語のテキスト 中文文本，標點。 한국어 ไทย हिन्दी العربية עברית",
    "🎉🏽👩‍👩‍👧‍👦 \U0001f1e9\U0001f1ea \ufe0f \x00\x01\x1c\x7f\x85\xa0\u180e\u2003\u2028\u200b\u3000\ufeff\x0b\x0c",
    "▁a ▁▁b a▁b <s> </s> <unk> <0x0A> <|endoftext|><|endoftext|> <|im_start|> <pad>",
    "z" * 300 + " " * 300 + "\n" * 50 + "ab" * 300,
    Path(tokenizers.__file__).read_text(),
)


def encode(tokenizer: Tokenizer, append_eod: bool) -> tuple[list[int], list[int]]:
    (found,) = Task(tokenizer, Reading(), append_eod).encode([list(HARD_TEXTS)])
    assert found.token_ids.dtype == np.dtype("<u2")
    return found.token_ids.tolist(), found.lengths.tolist()


def test_the_ids_are_those_of_tokenizers(hugging_face_directory: Path) -> None:
    plain = tokenizers.Tokenizer.from_file(str(hugging_face_directory / "tokenizer.json"))
    expected = [plain.encode(text, add_special_tokens=False).ids for text in HARD_TEXTS if text]
    tokenizer = HuggingFaceTokenizer(hugging_face_directory)
    assert encode(tokenizer, append_eod=False) == (sum(expected, []), list(map(len, expected)))
    ended = [[*ids, tokenizer.eod_id] for ids in expected]
    assert encode(tokenizer, append_eod=True) == (sum(ended, []), list(map(len, ended)))


def test_the_ids_are_those_of_sentencepiece(sentencepiece_tokenizer: SentencePieceTokenizer) -> None:
    plain = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_tokenizer.files[0]))
    expected = [plain.encode(text) for text in HARD_TEXTS if text]
    assert encode(sentencepiece_tokenizer, append_eod=False) == (sum(expected, []), list(map(len, expected)))
