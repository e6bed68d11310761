"""Tokenizers behind one protocol, their selection by flags, and the copies of them that checkpoints contain.

Ids are those of the text alone: no tokenizer adds a beginning-of-sequence token.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import msgspec
import sentencepiece
import tokenizers

from megatron_ladder.config.data import TokenizerType
from megatron_ladder.errors import UserError
from megatron_ladder.files import hub_hint, read_if_exists

DESCRIPTION_FILE = "megatron_ladder_tokenizer.json"

_COMMON_END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")
"""Searched in this order if no companion file names the end-of-document token."""


class Tokenizer(Protocol):
    """Converts text to ids and back."""

    kind: str
    """The --tokenizer-type that loads it; of several synonyms the first."""
    files: tuple[Path, ...] = ()
    """The files that a copy needs, --tokenizer-model first. Empty for a tokenizer without a vocabulary file."""
    contents: tuple[bytes, ...] = ()
    """Content of each file when the tokenizer was loaded; the file itself may have changed or disappeared since."""
    sha256: str
    """Hash of everything that determines the ids: tokenizers with equal hashes give equal ids."""
    vocab_size: int
    """The largest id + 1."""
    eod_id: int
    """The token that ends a document, and a generated text."""
    bos_id: int | None = None
    """The token that the tokenizer's files name for the beginning of a text; training and generation do not add it."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; none for an empty one."""

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text like `encode`, but without control tokens: their spellings are text, too."""
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; control tokens give no text, and incomplete characters give U+FFFD."""


class ByteTokenizer(Tokenizer):
    """Uses the bytes of UTF-8 as ids 0 to 255; 256 ends a document. For tests."""

    kind = "ByteTokenizer"
    sha256 = hashlib.sha256(b"ByteTokenizer").hexdigest()
    vocab_size = 257
    eod_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(number) for number in ids if number < self.eod_id).decode(errors="replace")


class NullTokenizer(Tokenizer):
    """Reads decimal ids below `vocab_size`, separated by spaces. The next id ends a document, as in Megatron."""

    kind = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise UserError(f"--vocab-size {vocab_size}: expected 1 or more")
        self.sha256 = hashlib.sha256(f"NullTokenizer {vocab_size}".encode()).hexdigest()
        self.vocab_size = vocab_size + 1
        self.eod_id = vocab_size

    def encode(self, text: str) -> list[int]:
        """Raise UserError for a word that is not an id of the vocabulary."""
        ids = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.eod_id:
                raise UserError(f"--tokenizer-type NullTokenizer: {word!r} found, expected 0 to {self.eod_id - 1}")
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(number)) for number in ids if number != self.eod_id)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model file. It represents spaces as U+2581, so this character itself is decoded as a space."""

    kind = "SentencePieceTokenizer"

    def __init__(self, model: Path) -> None:
        """Raises UserError if the file is missing, is not a SentencePiece model or has no end-of-sequence piece."""
        content = _read_model_file("--tokenizer-model", model, "a SentencePiece .model file")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise UserError(f"--tokenizer-model {model}: not a SentencePiece model ({error})") from None
        self.files = (model,)
        self.contents = (content,)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.eod_id: int = self._processor.eos_id()
        if self.eod_id < 0:
            raise UserError(f"--tokenizer-model {model}: has no end-of-sequence piece: train it with an eos_id")
        self.bos_id = self._processor.bos_id() if self._processor.bos_id() >= 0 else None

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(number) for number in ids]))


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library, or a directory that contains one."""

    kind = "HuggingFaceTokenizer"

    _COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
    """Files next to tokenizer.json that may name the end-of-sequence token."""

    def __init__(self, model: Path) -> None:
        """Raises UserError if the file is missing, is not a tokenizer.json, or has no end-of-document token."""
        path, content = model / "tokenizer.json", None
        if model.suffix != ".json":
            content = read_if_exists(path)
        if content is None:
            path = model
            content = _read_model_file("--tokenizer-model", path, "a tokenizer.json, or a directory that contains one")
        try:
            library = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # The library raises nothing narrower.
            raise UserError(f"--tokenizer-model {path}: not a tokenizer.json ({error})") from None
        companions = [path.with_name(name) for name in (*self._COMPANIONS, "chat_template.jinja")]
        found = {file: read_if_exists(file) for file in companions}
        contents = {path: content} | {file: text for file, text in found.items() if text is not None}
        self._initialize(library, contents, hashlib.sha256(content).hexdigest())

    def _initialize(self, library: tokenizers.Tokenizer, contents: Mapping[Path, bytes], sha256: str) -> None:
        # Padding and truncation are settings for batches of a fixed length; here they would change documents.
        library.no_padding()
        library.no_truncation()
        self._tokenizer = library
        self.files = tuple(contents)
        self.contents = tuple(contents.values())
        self.sha256 = sha256
        vocabulary = library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"--tokenizer-model {self.files[0]}: has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        beginnings = [token for _, token in self._named("bos_token") if isinstance(token, str) and token in vocabulary]
        self.bos_id = vocabulary[beginnings[0]] if beginnings else None
        self.eod_id = self._find_eod(vocabulary)

    def _named(self, kind: str) -> Iterator[tuple[Path, object]]:
        """Yield each companion file that names a special token, with its text, or an invalid value."""
        for companion, content in zip(self.files, self.contents, strict=True):
            if companion.name in self._COMPANIONS:
                token = parse_json_object(companion, content).get(kind)
                token = token.get("content") if isinstance(token, dict) else token
                if token is not None:
                    yield companion, token

    def _find_eod(self, vocabulary: dict[str, int]) -> int:
        for companion, token in self._named("eos_token"):
            if not (isinstance(token, str) and token in vocabulary):
                raise UserError(f"{companion}: eos_token {token!r:.60} is not in the vocabulary of {self.files[0]}")
            return vocabulary[token]
        for token in _COMMON_END_TOKENS:
            if token in vocabulary:
                return vocabulary[token]
        raise UserError(
            f"--tokenizer-model {self.files[0]}: the end-of-document token is unknown (none of "
            f"{' '.join(_COMMON_END_TOKENS)} is in the vocabulary): name it as eos_token in "
            f"{self.files[0].with_name(self._COMPANIONS[0])}"
        )

    def as_json(self) -> str:
        """Return the content of an equivalent tokenizer.json without padding and truncation."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        return list(self._without_added.encode(text, add_special_tokens=False).ids)

    @functools.cached_property
    def _without_added(self) -> Any:
        """The tokenizer without its added tokens, whether they are flagged as special or not."""
        settings = json.loads(self._tokenizer.to_str())
        return type(self._tokenizer).from_str(json.dumps({**settings, "added_tokens": []}))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=True)


class GPT2BPETokenizer(HuggingFaceTokenizer):
    """GPT-2's byte-pair encoding, read from its vocab.json and merges.txt."""

    kind = "GPT2BPETokenizer"

    END = "<|endoftext|>"

    def __init__(self, vocab_file: Path, merge_file: Path | None = None) -> None:
        """Raises UserError if a file is missing, the files do not fit each other, or <|endoftext|> is missing."""
        merge_file = merge_file or vocab_file.with_name("merges.txt")
        contents = (
            _read_model_file("--vocab-file", vocab_file, "GPT-2's vocab.json"),
            _read_model_file("--merge-file", merge_file, "GPT-2's merges.txt"),
        )
        try:
            vocabulary = json.loads(contents[0])
            lines = [line for line in contents[1].decode().split("\n") if line and not line.startswith("#version")]
            merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
            library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
        except Exception as error:  # The library raises nothing narrower.
            raise UserError(
                f"--vocab-file {vocab_file} --merge-file {merge_file}: not GPT-2's pair of files ({error})"
            ) from None
        if self.END not in vocabulary:
            raise UserError(f"--vocab-file {vocab_file}: lacks {self.END}, which ends a document")
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        library.add_special_tokens([self.END])
        # File names are up to the user; the concatenated contents are unambiguous.
        sha256 = hashlib.sha256(contents[0] + contents[1]).hexdigest()
        self._initialize(library, dict(zip((vocab_file, merge_file), contents, strict=True)), sha256)

    def _find_eod(self, vocabulary: dict[str, int]) -> int:
        return vocabulary[self.END]


_SYNONYMS = {
    "Llama2Tokenizer": SentencePieceTokenizer.kind,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer.kind,
    "HFTokenizer": HuggingFaceTokenizer.kind,
}

WITHOUT_FILES = (ByteTokenizer.kind, NullTokenizer.kind)


@dataclass(frozen=True)
class TokenizerSource:
    """The flags that select a tokenizer; small, so that it can be sent to another process.

    `tokenizer_model` is --tokenizer-model or --vocab-file; only GPT2BPETokenizer has a merge file, and only
    NullTokenizer a vocabulary size.
    """

    tokenizer_type: str
    tokenizer_model: Path | None = None
    merge_file: Path | None = None
    vocab_size: int | None = None


def load_source(source: TokenizerSource) -> Tokenizer:
    """Load a tokenizer; raises UserError for an unknown type, a missing flag or an unreadable file."""
    known = get_args(TokenizerType)
    if source.tokenizer_type not in known:
        raise UserError(f"--tokenizer-type {source.tokenizer_type}: expected one of {', '.join(known)}")
    kind, model = _SYNONYMS.get(source.tokenizer_type, source.tokenizer_type), source.tokenizer_model
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind == NullTokenizer.kind:
        if source.vocab_size is None:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(source.vocab_size)
    if model is None:
        flags = "--vocab-file and --merge-file" if kind == GPT2BPETokenizer.kind else "--tokenizer-model"
        raise UserError(f"--tokenizer-type {source.tokenizer_type} needs {flags}")
    if kind == GPT2BPETokenizer.kind:
        return GPT2BPETokenizer(model, source.merge_file)
    return SentencePieceTokenizer(model) if kind == SentencePieceTokenizer.kind else HuggingFaceTokenizer(model)


def load_tokenizer(tokenizer_type: str, tokenizer_model: Path) -> Tokenizer:
    """Load a tokenizer that a type and a file determine; raises as `load_source`."""
    return load_source(TokenizerSource(tokenizer_type, tokenizer_model))


def source_of(tokenizer: Tokenizer) -> TokenizerSource:
    """Return the source from which another process loads an equal tokenizer."""
    if tokenizer.kind in WITHOUT_FILES:
        return TokenizerSource(tokenizer.kind, vocab_size=tokenizer.vocab_size - 1)
    merge_file = tokenizer.files[1] if tokenizer.kind == GPT2BPETokenizer.kind else None
    return TokenizerSource(tokenizer.kind, tokenizer.files[0], merge_file)


class _Description(msgspec.Struct):
    """The content of DESCRIPTION_FILE."""

    format_version: Literal[1]
    tokenizer_type: str
    file: str | None
    merge_file: str | None
    sha256: str
    vocab_size: int


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return file names and contents for a copy of the tokenizer: its files as loaded, and a description of them."""
    source = source_of(tokenizer)
    model, merges = (path.name if path else None for path in (source.tokenizer_model, source.merge_file))
    description = _Description(1, tokenizer.kind, model, merges, tokenizer.sha256, tokenizer.vocab_size)
    contents = {file.name: content for file, content in zip(tokenizer.files, tokenizer.contents, strict=True)}
    return contents | {DESCRIPTION_FILE: (json.dumps(msgspec.to_builtins(description), indent=2) + "\n").encode()}


def load_tokenizer_from_directory(directory: Path) -> Tokenizer:
    """Load a copy that consists of `tokenizer_files`; raises UserError if it is missing or its files have changed."""
    path = directory / DESCRIPTION_FILE
    content = read_if_exists(path)
    if content is None:
        raise UserError(f"{path}: no such file: {directory} contains no tokenizer")
    try:
        found = msgspec.json.decode(content, type=_Description)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: {error}: copy the tokenizer again") from None
    model, merges = (directory / Path(name).name if name else None for name in (found.file, found.merge_file))
    tokenizer = load_source(TokenizerSource(found.tokenizer_type, model, merges, found.vocab_size - 1))
    if tokenizer.sha256 != found.sha256:
        changed = tokenizer.files[0] if tokenizer.files else path
        raise UserError(
            f"{changed}: sha256 is {tokenizer.sha256}, {path.name} expects {found.sha256}: copy the tokenizer again"
        )
    return tokenizer


def _read_model_file(flag: str, model: Path, expected: str) -> bytes:
    content = read_if_exists(model)
    if content is None:
        found = "is a directory" if model.is_dir() else "no such file"
        raise UserError(f"{flag} {model}: {found}, expected {expected}{hub_hint(model)}")
    return content


def parse_json_object(path: Path, content: bytes) -> dict[str, Any]:
    """Return the object in the content of a file; raises UserError for other content."""
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON object ({error})") from None
