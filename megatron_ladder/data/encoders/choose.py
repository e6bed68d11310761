"""Which library does the work: the fastest one whose ids are those of the tokenizer, on a sample, at every start."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from megatron_ladder.data.encoders.protocol import Encoder, NotExpressible, ReferenceEncoder
from megatron_ladder.data.encoders.with_gigatoken import GigatokenEncoder
from megatron_ladder.data.encoders.with_tiktoken import TiktokenEncoder
from megatron_ladder.data.tokenizers import GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megatron_ladder.errors import UserError

TokenizerLibrary = Literal["auto", "gigatoken", "tiktoken", "tokenizers", "sentencepiece"]
"""Values of --tokenizer-library."""

FASTER: dict[str, tuple[Callable[[Tokenizer], Encoder], ...]] = {
    HuggingFaceTokenizer.kind: (GigatokenEncoder, TiktokenEncoder),
    GPT2BPETokenizer.kind: (GigatokenEncoder, TiktokenEncoder),
    SentencePieceTokenizer.kind: (GigatokenEncoder,),
}
"""Kind of tokenizer -> libraries besides its own, fastest first (docs/data.md has their speeds)."""

REFERENCES = {
    HuggingFaceTokenizer.kind: "tokenizers",
    GPT2BPETokenizer.kind: "tokenizers",
    SentencePieceTokenizer.kind: "sentencepiece",
}
"""Kind of tokenizer -> the library that defines its ids; a kind that is not here is its own."""

SAMPLE_CHARACTERS = 1 << 17
"""Of the input's text that is compared at a start."""

TEXT_CHARACTERS = 1 << 13
"""Of one text that are compared: a sample should hold many texts."""

HARD_TEXTS = (
    "",
    " ",
    "\n",
    "  two leading, two trailing  ",
    "\tif x:\r\n\t\treturn  1\n\n\n    # done \n",
    "I'LL we'll DON'T don't 's 'S 're'Ve it's",
    "1234567890 x=12345 3.14e-10 1,000,000 ٣٤٥ Ⅷ ½",
    "héllo wörld — naïve Ærøskøbing ﬁ ① Å e\u0301",
    "日本語のテキスト 中文文本，標點。 한국어 ไทย हिन्दी العربية עברית",
    "🎉🏽👩‍👩‍👧‍👦 \U0001f1e9\U0001f1ea \ufe0f",
    "\x00\x01\x1c\x7f\x85\xa0\u180e\u2003\u2028\u200b\u3000\ufeff\x0b\x0c",
    "a\u00a0b\u2003c\u0085d\u3000 \u2009 e",
    "▁a ▁▁b a▁b",
    "<s> </s> <unk> <0x0A> <|endoftext|><|endoftext|> <|im_start|> <pad>",
    "___ --- !!! ... \\\\ ((( )))]]] =>->:: /* */ #!/",
    "z" * 300 + " " * 300 + "\n" * 50 + "ab" * 300,
)
"""Compared besides the input's own texts: what pre-tokenizers differ in."""


class Choice(NamedTuple):
    """The encoder that was chosen, and a sentence about it."""

    encoder: Encoder
    sentence: str


def make_encoder(tokenizer: Tokenizer, library: str) -> Encoder:
    """The encoder of a library by its name; NotExpressible when it cannot do this tokenizer's work."""
    reference = REFERENCES.get(tokenizer.kind, tokenizer.kind)
    if library == reference:
        return ReferenceEncoder(tokenizer, reference)
    for make in FASTER.get(tokenizer.kind, ()):
        if getattr(make, "library", None) == library:
            return make(tokenizer)
    raise NotExpressible(f"knows nothing of a {tokenizer.kind}")


def choose_encoder(tokenizer: Tokenizer, library: str, texts: Sequence[str]) -> Choice:
    """The fastest library with the tokenizer's ids; the tokenizer's own if no other has them.

    Args:
        library: `auto`, or the one that is to do the work.
        texts: some of the input, which are compared besides HARD_TEXTS.

    Raises:
        UserError: the library that was asked for cannot do it, or gives other ids.
    """
    reference = REFERENCES.get(tokenizer.kind, tokenizer.kind)
    names = [getattr(make, "library", "") for make in FASTER.get(tokenizer.kind, ())]
    if library not in ("auto", reference):
        names = [library]
    elif library == reference:
        names = []
    sample = [*HARD_TEXTS, *_cut(texts)]
    reasons = []
    for name in names:
        try:
            encoder = make_encoder(tokenizer, name)
        except NotExpressible as error:
            reasons.append(f"{name}: {error}")
            continue
        difference = find_difference(tokenizer, encoder, sample)
        if difference is None:
            left_out = f" ({'; '.join(reasons)})" if reasons else ""
            return Choice(
                encoder, f"{name} does the work{left_out}: its ids are those of {reference} on {len(sample):,} texts"
            )
        reasons.append(f"{name}: other ids than {reference} for {difference}")
    if library not in ("auto", reference):
        raise UserError(f"--tokenizer-library {'; '.join(reasons)}: leave the flag out")
    left_out = f" ({'; '.join(reasons)})" if reasons else ""
    return Choice(make_encoder(tokenizer, reference), f"{reference} does the work{left_out}")


def find_difference(tokenizer: Tokenizer, encoder: Encoder, texts: Sequence[str]) -> str | None:
    """The first text, cut short, whose ids by the encoder are not the tokenizer's; None if there is none."""
    for text, expected, found in zip(texts, tokenizer.encode_batch(texts), encoder.encode(texts), strict=True):
        if not np.array_equal(np.array(expected, dtype=np.int64), found):
            return ascii(text[:40])
    return None


def _cut(texts: Sequence[str]) -> list[str]:
    chosen: list[str] = []
    left = SAMPLE_CHARACTERS
    for text in texts:
        if left <= 0:
            break
        chosen.append(text[: min(TEXT_CHARACTERS, left)])
        left -= len(chosen[-1])
    return chosen
