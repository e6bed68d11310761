"""Training of tokenizers: SentencePiece models and byte-level tokenizer.json files."""

import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import sentencepiece
import tokenizers

from megatron_ladder.data.reading.protocol import Source, read_records
from megatron_ladder.errors import Problem, UserError

MAX_LINE_BYTES = 1 << 16
"""SentencePiece ignores longer lines in training."""
_PIECE_CHARACTERS = 1 << 14
"""Approximate size of the pieces of text for the bpe trainer, which also learns line feeds."""
_END_OF_TEXT = "<|endoftext|>"
"""The end-of-document token of a tokenizer.json that is trained here."""


class TextSample:
    """Text for a trainer, sampled evenly from the whole input; counts the lines that are too long for it."""

    def __init__(self, sources: Sequence[Source], most_bytes: int, in_lines: bool) -> None:
        """Prepare a sample of about `most_bytes`, or that much of the beginning of an input of unknown size.

        Raise a UserError if the input is empty.
        """
        sizes = [source.total_bytes for source in sources]
        self.input_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        if self.input_bytes == 0:
            names = " ".join(source.name for source in sources)
            raise UserError(Problem({"input": names}, "{}: there is no text in it"))
        self.used_bytes = min(self.input_bytes or most_bytes, most_bytes)
        self.too_long = 0
        self._share = self.used_bytes / (self.input_bytes or self.used_bytes)
        self._most_bytes = math.inf if self.input_bytes else most_bytes
        self._sources = sources
        self._in_lines = in_lines

    def __iter__(self) -> Iterator[str]:
        """Yield lines or larger pieces, evenly spaced; raises UserError if a record cannot be read."""
        taken = 0
        for number, piece in enumerate(self._pieces()):
            if int((number + 1) * self._share) == int(number * self._share):
                continue
            # A character has at most four bytes, so only few lines must be encoded to be measured.
            if self._in_lines and 4 * len(piece) > MAX_LINE_BYTES and len(piece.encode()) > MAX_LINE_BYTES:
                self.too_long += 1
                continue
            taken += len(piece)
            if taken > self._most_bytes:
                return
            yield piece

    def _pieces(self) -> Iterator[str]:
        for text in itertools.chain.from_iterable(read_records(self._sources)):
            if self._in_lines:
                yield from text.split("\n")
                continue
            begin = 0
            while begin < len(text):
                end = text.find("\n", begin + _PIECE_CHARACTERS)
                end = len(text) if end < 0 else end
                yield text[begin:end]
                begin = end


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a byte-pair SentencePiece model and return its .model file; raises UserError if `vocab_size` does not fit.

    Decoding restores every text exactly: there is no normalization, whitespace is kept, and characters outside of the
    vocabulary (newlines and tabs always are) are encoded as bytes. Ids: 0 unk, 1 bos, 2 eos, 3 to 258 the bytes. Equal
    texts give equal files.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.split("\n") if line),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=MAX_LINE_BYTES,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        # Its messages begin with a position in its source code and end by naming its own options.
        why = str(error).rpartition(")] ")[2].partition(" Increase")[0] or "it has no text to learn from"
        reason = "{}: SentencePiece cannot make such a model ({why})"
        raise UserError(Problem({"vocab_size": vocab_size}, reason, why=why)) from None
    return model.getvalue()


def _train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Return a tokenizer.json, trained like GPT-2's byte-pair encoding; raises UserError if `vocab_size` does not fit.

    Decoding restores every text exactly. Id 0 is <|endoftext|>, followed by the 256 bytes.
    """
    if vocab_size < 257:
        expected = f"{{}}: expected 257 or more: 256 bytes and {_END_OF_TEXT}"
        raise UserError(Problem({"vocab_size": vocab_size}, expected))
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    size = library.get_vocab_size()
    if size < vocab_size:
        reason = f"{{}}: too high for these texts, which give only {size} tokens"
        raise UserError(Problem({"vocab_size": vocab_size}, reason))
    return library.to_str(pretty=True).encode()


class TokenizerTrainer(NamedTuple):
    """One --model-type."""

    tokenizer_type: str
    """The kind of the file that it makes."""
    in_lines: bool
    """Whether it learns from lines; otherwise from larger pieces of text."""
    train: Callable[[Iterable[str], int], bytes]
    """Returns the content of the file for texts and the size of the vocabulary."""


TRAINERS: dict[str, TokenizerTrainer] = {
    "sentencepiece": TokenizerTrainer("SentencePieceTokenizer", True, train_sentencepiece),
    "bpe": TokenizerTrainer("HuggingFaceTokenizer", False, _train_bpe),
}
