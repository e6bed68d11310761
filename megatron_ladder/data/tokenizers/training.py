"""Training of tokenizers: SentencePiece models and byte-level tokenizer.json files."""

import io
from collections.abc import Iterable, Iterator

import sentencepiece
import tokenizers

from megatron_ladder.errors import UserError

MAX_LINE_BYTES = 1 << 16
"""SentencePiece passes over longer lines when it trains."""

END_OF_TEXT = "<|endoftext|>"
"""Ends a document in a tokenizer.json that is trained here."""


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a byte-pair SentencePiece model and returns the content of its .model file.

    Every text comes back from its ids as it was: no normalisation, whitespace kept, and characters outside
    of the vocabulary (newlines and tabs are always among them) are spelled in bytes. Ids: 0 unk, 1 bos,
    2 eos, 3 to 258 the bytes. Equal texts give equal files.

    Raises:
        UserError: when `vocab_size` does not fit the texts.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
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
        # Its messages begin with a place in its source and end by naming options of its own.
        reason = str(error).rpartition(")] ")[2].partition(" Increase")[0] or "it has no text to learn from"
        raise UserError(
            f"--vocab-size {vocab_size}: SentencePiece cannot make such a model ({reason})"
        ) from None
    return model.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Non-empty lines, as SentencePiece trains on lines; a line feed is a byte token anyway."""
    return (line for text in texts for line in text.split("\n") if line)


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a byte-level byte-pair tokenizer as GPT-2's and returns the content of its tokenizer.json.

    Every text comes back from its ids as it was. Id 0 is <|endoftext|>; then come the 256 bytes.

    Raises:
        UserError: when `vocab_size` does not fit the texts.
    """
    if vocab_size < 257:
        raise UserError(f"--vocab-size {vocab_size}: expected 257 or more: 256 bytes and {END_OF_TEXT}")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    found = library.get_vocab_size()
    if found < vocab_size:
        raise UserError(f"--vocab-size {vocab_size}: too high for these texts, which give {found} tokens")
    return library.to_str(pretty=True).encode()
