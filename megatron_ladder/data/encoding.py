"""The work of a preprocessing worker after reading: converts the values of a block to tokens, with the fastest library.

A library is used instead of the reference library, which defines a tokenizer's ids, only if its ids are the same on a
sample of the input. The comparison is repeated at every start. If no faster library is installed or none agrees, the
reference library encodes the texts.
"""

import array
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from megatron_ladder.data.indexed import token_dtype
from megatron_ladder.data.reading.protocol import Parsed, Reading
from megatron_ladder.data.tokenizers import (
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerSource,
    load_source,
)
from megatron_ladder.errors import UserError

_REFERENCES = {
    HuggingFaceTokenizer.kind: "tokenizers",
    GPT2BPETokenizer.kind: "tokenizers",
    SentencePieceTokenizer.kind: "sentencepiece",
}
"""Kind of tokenizer -> the library that defines its ids; gigatoken is a faster library for all of them (docs/data.md
has the speeds). Any other kind is implemented in tokenizers.py, and the kind is the library's name."""

_SAMPLE_CHARACTERS = 1 << 17
"""Characters of the input that are compared at a start."""

_TEXT_CHARACTERS = 1 << 13
"""Characters that are compared of one text, so that the sample holds many texts."""

_HARD_TEXTS = (
    *("", " ", "\n"),
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
"""Texts on which pre-tokenizers typically differ; compared in addition to the sample of the input."""

_CACHE_BYTES = 192 << 20
"""gigatoken's cache of words grows without limit; above this size the tokenizer is loaded again."""

_CHECK_CHARACTERS = 8 << 20
"""Characters encoded between two checks of the cache's size."""


class Encoder(Protocol):
    """Encodes many texts into arrays of ids with a library."""

    library: str

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[Any]]:
        """Yield the ids [tokens] of each text on demand, as unsigned integers of at most 32 bits."""


class UnsupportedTokenizerError(Exception):
    """The library cannot encode for this tokenizer; the message is the reason."""


class _ReferenceEncoder:
    def __init__(self, tokenizer: Tokenizer, library: str) -> None:
        self.library = library
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[Any]]:
        # Twice as fast as np.array, which inspects the type of every number.
        arrays = (array.array("I", ids) for ids in self._tokenizer.encode_batch(texts))
        return (np.frombuffer(ids, np.uintc) if ids else np.empty(0, np.uintc) for ids in arrays)


class _GigatokenEncoder:
    """A tokenizer.json, GPT-2's files or a byte-pair SentencePiece model, encoded by gigatoken."""

    library = "gigatoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UnsupportedTokenizerError if gigatoken is not installed or does not support the tokenizer."""
        try:
            import gigatoken
        except ImportError as error:
            raise UnsupportedTokenizerError(f"not installed (pip install gigatoken; {error})") from None
        if isinstance(tokenizer, SentencePieceTokenizer):
            self._json = _sentencepiece_json(tokenizer)
        else:
            assert isinstance(tokenizer, HuggingFaceTokenizer)
            self._json = tokenizer.as_json()
        self._from_json: Any = gigatoken.Tokenizer.from_json
        self._process = psutil.Process()
        self._backend: Any = None
        try:
            self._load()
        except Exception as error:  # It raises nothing narrower for what it does not support.
            raise UnsupportedTokenizerError(f"rejects the tokenizer ({error})") from None

    def _load(self) -> None:
        self._backend = None  # Frees the old cache first.
        self._backend = self._from_json(self._json).backend
        self._loaded_bytes = self._process.memory_info().rss
        self._unchecked = 0

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[Any]]:
        self._unchecked += sum(map(len, texts))
        if self._unchecked > _CHECK_CHARACTERS:
            self._unchecked = 0
            if self._process.memory_info().rss - self._loaded_bytes > _CACHE_BYTES:
                self._load()
        return map(self._backend.encode, texts)


def _sentencepiece_json(tokenizer: SentencePieceTokenizer) -> str:
    """Return gigatoken's conversion of the model, changed so that, as in SentencePiece, a text such as `<s>` or
    `<0x0A>` is never read as the control token or byte of that name."""
    try:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json
    except ImportError as error:
        raise UnsupportedTokenizerError(f"this release cannot read SentencePiece models ({error})") from None
    try:
        values = json.loads(sentencepiece_to_tokenizer_json(tokenizer.files[0].read_bytes()))
    except ValueError as error:
        raise UnsupportedTokenizerError(str(error)) from None
    outside = tokenizer.pieces_outside_of_text()
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] not in outside]
    model = values["model"]
    model["merges"] = [(left, right) for left, right in model["merges"] if left + right not in outside]
    return json.dumps(values, ensure_ascii=False)


class EncoderChoice(NamedTuple):
    """The chosen encoder, and a sentence that reports the choice."""

    encoder: Encoder
    sentence: str


def make_encoder(tokenizer: Tokenizer, library: str) -> Encoder:
    """Return the encoder of a library by name; raises UnsupportedTokenizerError if it does not fit the tokenizer."""
    if library == _REFERENCES.get(tokenizer.kind, tokenizer.kind):
        return _ReferenceEncoder(tokenizer, library)
    if library != _GigatokenEncoder.library or tokenizer.kind not in _REFERENCES:
        raise UnsupportedTokenizerError(f"does not support {tokenizer.kind}")
    return _GigatokenEncoder(tokenizer)


def choose_encoder(tokenizer: Tokenizer, library: str, texts: Sequence[str]) -> EncoderChoice:
    """Return the fastest library that gives the tokenizer's ids; the reference library if no faster one does.

    The ids of `texts`, a sample of the input, and of _HARD_TEXTS are compared. Raises UserError if `library`, a value
    of --tokenizer-library, does not support the tokenizer or gives different ids.
    """
    reference = _REFERENCES.get(tokenizer.kind, tokenizer.kind)
    reason = ""
    if library != reference and (library != "auto" or tokenizer.kind in _REFERENCES):
        name = _GigatokenEncoder.library if library == "auto" else library
        sample, left = [*_HARD_TEXTS], _SAMPLE_CHARACTERS
        for text in texts:
            sample.append(text[: min(_TEXT_CHARACTERS, left)])
            left -= len(sample[-1])
            if left <= 0:
                break
        try:
            encoder = make_encoder(tokenizer, name)
            difference = _find_difference(tokenizer, encoder, sample)
            if difference is None:
                equal = f"its ids equal those of {reference} on {len(sample):,} texts"
                return EncoderChoice(encoder, f"{name} encodes; {equal}")
            reason = f"{name}: its ids differ from those of {reference} for {difference}"
        except UnsupportedTokenizerError as error:
            reason = f"{name}: {error}"
        if library != "auto":
            raise UserError(f"--tokenizer-library {reason}: leave the flag out")
    suffix = f" ({reason})" if reason else ""
    return EncoderChoice(make_encoder(tokenizer, reference), f"{reference} encodes{suffix}")


def _find_difference(tokenizer: Tokenizer, encoder: Encoder, texts: Sequence[str]) -> str | None:
    for text, expected, found in zip(texts, tokenizer.encode_batch(texts), encoder.encode(texts), strict=True):
        if not np.array_equal(np.array(expected, dtype=np.int64), found):
            return ascii(text[:40])
    return None


_BLOCK_TOKENS = 1 << 16
"""Tokens that are joined, checked and cast at once."""


class KeyTokens(NamedTuple):
    """Tokens [sum(lengths)] of some documents in the type of the file, without documents that have no token.

    The largest id is -1 if there is no token. The loss mask [sum(lengths)] is None if every token counts.
    """

    token_ids: NDArray[Any]
    lengths: NDArray[np.int32]
    largest_id: int
    loss_mask: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Task(ABC):
    """Converts records to tokens. It is sent to the worker processes, so it is small and immutable."""

    source: TokenizerSource
    sha256: str
    vocab_size: int
    eod_id: int
    reading: Reading
    append_eod: bool
    conversations = False
    """Whether every document is a conversation, and its tokens have a loss mask."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """Names of the output data sets: `<prefix>_<name>_document`."""

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Type of the token files: Megatron's choice for the vocabulary."""
        return token_dtype(self.vocab_size)

    def identity(self) -> dict[str, Any]:
        """Return everything except the input that determines the tokens; JSON-able."""
        values = {"tokenizer": self.sha256, **self._flags(), "--append-eod": self.append_eod}
        values["--max-document-megabytes"] = self.reading.max_bytes >> 20
        return values | ({"end-of-document token": self.eod_id} if self.append_eod else {})

    @abstractmethod
    def _flags(self) -> dict[str, Any]:
        """Return the flags of this kind of task."""

    def prepare(self, parsed: Parsed) -> Parsed:
        """Return the values to encode of a block; records that cannot be encoded become bad records."""
        return parsed

    @abstractmethod
    def encode(self, columns: Sequence[list[Any]]) -> tuple[KeyTokens, ...]:
        """Return the tokens for each output, from the columns of what was prepared."""


@dataclass(frozen=True)
class TextTask(Task):
    """Makes each text of a key a document.

    `library` encodes. `encoder` is the encoder that was compared; it is not sent to other processes.
    """

    library: str
    encoder: Encoder | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"encoder": None}

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.reading.keys

    def _flags(self) -> dict[str, Any]:
        return {"--json-keys": list(self.reading.keys)}

    def encode(self, columns: Sequence[list[Any]]) -> tuple[KeyTokens, ...]:
        encoder = self.encoder or _load_encoder(self.source, self.sha256, self.library)
        end = self.eod_id if self.append_eod else None
        return tuple(_join(encoder.encode(texts), end, self.dtype) for texts in columns)


@functools.cache
def _load_encoder(source: TokenizerSource, sha256: str, library: str) -> Encoder:
    return make_encoder(load_unchanged(source, sha256), library)


def load_unchanged(source: TokenizerSource, sha256: str) -> Tokenizer:
    """Load a tokenizer in a worker; raises UserError if it differs from the one that other processes use."""
    tokenizer = load_source(source)
    if tokenizer.sha256 != sha256:
        raise UserError(f"--tokenizer-model {source.tokenizer_model}: changed while it was used: start again")
    return tokenizer


def _join(documents: Iterable[NDArray[Any]], end: int | None, dtype: "np.dtype[Any]") -> KeyTokens:
    """Concatenate the documents that are not empty, each followed by `end`; raises ValueError for too large ids."""
    lengths, parts, largest = list[int](), list[NDArray[Any]](), -1
    for block in _blocks(documents, end, lengths):
        largest = max(largest, int(block.max()))
        if largest > np.iinfo(dtype).max:
            raise ValueError(f"token id {largest} does not fit {dtype}")
        parts.append(block.astype(dtype))
    token_ids = np.concatenate(parts) if parts else np.empty(0, dtype)
    return KeyTokens(token_ids, np.array(lengths, np.int32), largest)


def _blocks(documents: Iterable[NDArray[Any]], end: int | None, lengths: list[int]) -> Iterator[NDArray[np.uint32]]:
    """Yield the joined tokens, up to _BLOCK_TOKENS at a time, always in the same array; append lengths to `lengths`.

    A document is copied as soon as the encoder yields it, and can then be freed, while its ids and the array are still
    in the processor's cache.
    """
    block, filled = np.empty(_BLOCK_TOKENS, np.uint32), 0
    for ids in documents:
        if not len(ids):
            continue
        lengths.append(len(ids) + (end is not None))
        # Afterwards the rest is shorter than the free space, so `end` fits.
        while len(ids) >= (room := _BLOCK_TOKENS - filled):
            block[filled:] = ids[:room]
            yield block
            ids, filled = ids[room:], 0
        block[filled : filled + len(ids)] = ids
        filled += len(ids)
        if end is not None:
            block[filled] = end
            filled += 1
    if filled:
        yield block[:filled]
