"""Tokenizers behind one small protocol, and how one travels with a checkpoint.

Ids are those of the text alone: nothing puts a beginning-of-sequence token in front.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import sentencepiece
import tokenizers

from megatron_ladder.data.files import write_atomically
from megatron_ladder.errors import UserError

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "HFTokenizer",
]
"""Values of --tokenizer-type: three names of the first kind, two of the second."""

DESCRIPTION_FILE = "megatron_ladder_tokenizer.json"
FORMAT_VERSION = 1

MAX_LINE_BYTES = 1 << 16
"""SentencePiece passes over longer lines when it trains."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    kind: str
    """The --tokenizer-type that loads it again."""
    files: tuple[Path, ...]
    """What a copy needs; the first is the --tokenizer-model."""
    sha256: str
    """Of the first file: equal ones give equal ids."""
    vocab_size: int
    """One more than the largest id."""
    eod_id: int
    """What ends a document, and a generated text."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; none for an empty one."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens give none, and bytes that are no whole character give U+FFFD."""


class SentencePieceTokenizer:
    """A SentencePiece .model file.

    SentencePiece writes spaces as U+2581, so that character itself comes back as a space.
    """

    kind = "SentencePieceTokenizer"

    def __init__(self, model: Path) -> None:
        """
        Raises:
            UserError: when the file is missing, is no SentencePiece model, or has no end-of-sequence piece.
        """
        content = _read_file(model, "a SentencePiece .model file")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise UserError(f"--tokenizer-model {model}: not a SentencePiece model ({error})") from None
        self.files: tuple[Path, ...] = (model,)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.eod_id: int = self._processor.eos_id()
        if self.eod_id < 0:
            raise UserError(
                f"--tokenizer-model {model}: has no end-of-sequence piece: train it with an eos_id"
            )

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        text: str = self._processor.decode([int(number) for number in ids])
        return text


class HuggingFaceTokenizer:
    """A tokenizer.json of the `tokenizers` library, or a directory that holds one."""

    kind = "HuggingFaceTokenizer"

    COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
    """Files beside tokenizer.json that may name the end-of-sequence token."""
    USUAL_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")
    """Looked for, in this order, when no companion names it."""

    def __init__(self, model: Path) -> None:
        """
        Raises:
            UserError: when the file is missing, is no tokenizer.json, or no token that ends a document is
                found.
        """
        path = model / "tokenizer.json" if model.is_dir() else model
        content = _read_file(path, "a tokenizer.json, or a directory that holds one")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # The library raises nothing narrower.
            raise UserError(f"--tokenizer-model {path}: not a tokenizer.json ({error})") from None
        # Padding and truncation are settings for batches of a fixed length; here they would change documents.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        companions = [path.with_name(name) for name in self.COMPANIONS]
        self.files: tuple[Path, ...] = (path, *(companion for companion in companions if companion.is_file()))
        self.sha256 = hashlib.sha256(content).hexdigest()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = self._find_eod(vocabulary)

    def _find_eod(self, vocabulary: dict[str, int]) -> int:
        for companion in self.files[1:]:
            token = _read_json(companion).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and token not in vocabulary:
                raise UserError(
                    f"{companion}: eos_token {token!r} is not in the vocabulary of {self.files[0]}"
                )
            if token is not None:
                return vocabulary[token]
        for token in self.USUAL_ENDS:
            if token in vocabulary:
                return vocabulary[token]
        raise UserError(
            f"--tokenizer-model {self.files[0]}: which token ends a document is not known (none of "
            f"{' '.join(self.USUAL_ENDS)} is in the vocabulary): name it as eos_token in "
            f"{self.files[0].with_name(self.COMPANIONS[0])}"
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, in the library's own threads."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=True)


TOKENIZER_CLASSES: dict[str, type[SentencePieceTokenizer] | type[HuggingFaceTokenizer]] = {
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "Llama2Tokenizer": SentencePieceTokenizer,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer,
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
    "HFTokenizer": HuggingFaceTokenizer,
}


def load_tokenizer(tokenizer_type: str, tokenizer_model: Path) -> Tokenizer:
    """Raises UserError for an unknown type, and for a file that the type cannot read."""
    if tokenizer_type not in TOKENIZER_CLASSES:
        raise UserError(f"--tokenizer-type {tokenizer_type}: expected one of {', '.join(TOKENIZER_CLASSES)}")
    return TOKENIZER_CLASSES[tokenizer_type](tokenizer_model)


def copy_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Copies the tokenizer's files into a checkpoint, with a description that finds them again."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.files:
        write_atomically(directory / file.name, file.read_bytes())
    description = {
        "format_version": FORMAT_VERSION,
        "tokenizer_type": tokenizer.kind,
        "file": tokenizer.files[0].name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
    }
    write_atomically(directory / DESCRIPTION_FILE, (json.dumps(description, indent=2) + "\n").encode())


def load_tokenizer_from_directory(directory: Path) -> Tokenizer:
    """Loads what `copy_tokenizer` left.

    Raises:
        UserError: when there is none, or its file is not the one that was copied.
    """
    path = directory / DESCRIPTION_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file: {directory} holds no tokenizer")
    description = _read_json(path)
    missing = {"tokenizer_type", "file", "sha256"} - set(description)
    if missing:
        raise UserError(f"{path}: lacks {', '.join(sorted(missing))}: copy the tokenizer again")
    tokenizer = load_tokenizer(description["tokenizer_type"], directory / Path(description["file"]).name)
    if tokenizer.sha256 != description["sha256"]:
        raise UserError(
            f"{tokenizer.files[0]}: sha256 is {tokenizer.sha256}, {path.name} expects "
            f"{description['sha256']}: copy the tokenizer again"
        )
    return tokenizer


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


def _read_file(path: Path, expected: str) -> bytes:
    if not path.is_file():
        found = "is a directory" if path.is_dir() else "no such file"
        raise UserError(f"--tokenizer-model {path}: {found}, expected {expected}")
    return path.read_bytes()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: a JSON object expected, a {type(values).__name__} found")
    return values
