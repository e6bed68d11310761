"""The kinds of tokenizers: their protocol, and a table of their names, files and loaders.

Ids are those of the text alone: no tokenizer adds a beginning-of-sequence token. A kind imports its library when it is
loaded, because the command line reads the table.
"""

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from megatron_ladder.errors import Problem, UserError
from megatron_ladder.files import hub_hint, read_if_exists

Identity = str | tuple[str, ...]
"""What the ids of a tokenizer depend on: the SHA-256 of its file, or of the file in use and of those in its directory
that contain the same tokenizer in other formats."""


class Tokenizer(Protocol):
    """Converts text to ids and back."""

    kind: str
    """The --tokenizer-type that loads it; of several synonyms the first."""
    files: tuple[Path, ...] = ()
    """The files that a copy needs, --tokenizer-model first. Empty for a tokenizer without a vocabulary file."""
    contents: tuple[bytes, ...] = ()
    """Content of each file when the tokenizer was loaded; the file itself may have changed or disappeared since."""
    sha256: str
    """Hash of everything that determines the ids: tokenizers with equal hashes give equal ids. See `identity`."""
    vocab_size: int
    """The largest id + 1."""
    eod_id: int
    """The token that ends a document, and a generated text."""
    bos_id: int | None = None
    """The token that the tokenizer's files name for the beginning of a text; training and generation do not add it."""
    special_tokens: tuple[str, ...] = ()
    """Tokens whose spelling `encode` converts to them, and which do not belong in a document."""
    control_tokens: Mapping[int, str] = MappingProxyType({})
    """The spelling of each control token that has one; `decode` leaves these tokens out."""
    finds_tokens: bool = False
    """Whether it finds tokens in a text before it encodes the rest, as rendered conversations need."""
    added_tokens: tuple[str, ...] = ()
    """Tokens that it finds: special ones, and others, such as `<think>`."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; none for an empty one."""

    def encode_documents(self, texts: Sequence[str], parse_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text; the spelling of a special token is text unless `parse_special_tokens` is set."""
        return [self.encode(text) for text in texts]

    def encode_with_offsets(
        self, texts: Sequence[str], spelled: Sequence[Sequence[int]]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of each text, and the first character and the end of each of them, if it `finds_tokens`.

        An added token that contains one of the positions `spelled`, in order, of its text is encoded as text.
        """
        raise TypeError(f"{self.kind} finds no tokens")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; control tokens give no text, and incomplete characters give U+FFFD."""

    def pieces(self) -> list[str]:
        """Return the spelling of each id in its files."""
        return []

    def named_tokens(self) -> dict[str, str]:
        """Return special tokens by their names in transformers, such as `eos_token`."""
        return {}

    def added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that transformers puts before and after a text, with the tokenizer's files."""
        return (), ()

    def as_json(self, adds_tokens: bool = True) -> bytes | None:
        """Return a tokenizer.json that gives the same ids in transformers; None for a kind that has none there.

        Without `adds_tokens`, transformers adds no tokens around a text. Raises UserError if its ids would differ.
        """
        return None

    @functools.cached_property
    def identity(self) -> Identity:
        """What decides whether another tokenizer is the same; see `same_tokenizer`."""
        hashes = (self.sha256, *_other_formats(self))
        return hashes if len(hashes) > 1 else self.sha256

    @property
    def selection(self) -> dict[str, object]:
        """The field that selects it, with its value, for problems."""
        return {"tokenizer_model": self.files[0]} if self.files else {"tokenizer_type": self.kind}


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
            raise UserError(Problem({"vocab_size": vocab_size}, "{}: expected 1 or more"))
        self.sha256 = hashlib.sha256(f"NullTokenizer {vocab_size}".encode()).hexdigest()
        self.vocab_size = vocab_size + 1
        self.eod_id = vocab_size

    def encode(self, text: str) -> list[int]:
        """Raise UserError for a word that is not an id of the vocabulary."""
        ids = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.eod_id:
                reason = "{}: {word} found, expected 0 to {last}"
                raise UserError(Problem(self.selection, reason, word=repr(word), last=self.eod_id - 1))
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(number)) for number in ids if number != self.eod_id)


class TokenizerKind(NamedTuple):
    """A row of TOKENIZER_KINDS."""

    names: tuple[str, ...]
    """Values of --tokenizer-type; the first is the `kind` that manifests and sidecars record."""
    files: tuple[str, ...]
    """Names of the file in a model's directory; none for a kind without a file."""
    load: Callable[..., Tokenizer]
    """Imports its library, and loads the file, if it has one, with the values that it `takes`."""
    takes: tuple[str, ...] = ()
    """Names of the other arguments of `load_tokenizer` that determine it."""


def _load_hugging_face(model: Path, eod_token: str | None = None) -> Tokenizer:
    from megatron_ladder.tokenizers.hugging_face import HuggingFaceTokenizer

    return HuggingFaceTokenizer(model, eod_token)


def _load_sentencepiece(model: Path) -> Tokenizer:
    from megatron_ladder.tokenizers.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer(model)


TOKENIZER_KINDS = (
    TokenizerKind(("HuggingFaceTokenizer", "HFTokenizer"), ("tokenizer.json",), _load_hugging_face, ("eod_token",)),
    TokenizerKind(
        ("SentencePieceTokenizer", "Llama2Tokenizer", "GPTSentencePieceTokenizer"),
        ("tokenizer.model",),
        _load_sentencepiece,
    ),
    TokenizerKind((ByteTokenizer.kind,), (), ByteTokenizer),
    TokenizerKind((NullTokenizer.kind,), (), NullTokenizer, ("vocab_size",)),
)
"""In a directory without a description, the first whose file exists is used."""
TOKENIZER_TYPES = tuple(name for kind in TOKENIZER_KINDS for name in kind.names)
if TYPE_CHECKING:
    TokenizerType = str
else:
    # The command line reads the choices from the type.
    TokenizerType = Literal[TOKENIZER_TYPES]


def tokenizer_kind(tokenizer_type: str) -> TokenizerKind:
    """Return the row of a name; raises UserError if it is unknown."""
    for kind in TOKENIZER_KINDS:
        if tokenizer_type in kind.names:
            return kind
    expected = ", ".join(TOKENIZER_TYPES)
    raise UserError(Problem({"tokenizer_type": tokenizer_type}, "{}: expected one of {expected}", expected=expected))


def load_tokenizer(
    tokenizer_type: str,
    tokenizer_model: Path | None = None,
    vocab_size: int | None = None,
    eod_token: str | None = None,
) -> Tokenizer:
    """Load the tokenizer that the flags select; `vocab_size` is that of NullTokenizer.

    Raises UserError for an unknown type, a missing flag or an unreadable file.
    """
    kind = tokenizer_kind(tokenizer_type)
    name = kind.names[0]
    if eod_token is not None and "eod_token" not in kind.takes:
        reason = "{}: {name} has its own end-of-document token"
        raise UserError(Problem({"eod_token": eod_token}, reason, "leave it out", name=name))
    if tokenizer_model is not None and not kind.files:
        raise UserError(
            Problem({"tokenizer_model": tokenizer_model}, "{}: {name} has no file", "leave it out", name=name)
        )
    if tokenizer_model is None and kind.files:
        raise UserError(Problem({"tokenizer_type": tokenizer_type}, "{} needs {tokenizer_model}"))
    if vocab_size is None and "vocab_size" in kind.takes:
        raise UserError(Problem({"tokenizer_type": tokenizer_type}, "{} needs {vocab_size}"))
    values: dict[str, Any] = {"vocab_size": vocab_size, "eod_token": eod_token}
    taken = {name: values[name] for name in kind.takes}
    return kind.load(tokenizer_model, **taken) if kind.files else kind.load(**taken)


def hashes_of(identity: Identity) -> tuple[str, ...]:
    """Return the hashes of an identity, that of the file in use first."""
    return (identity,) if isinstance(identity, str) else tuple(identity)


def same_tokenizer(first: Identity, second: Identity) -> bool:
    """Return whether the file in use of one of two tokenizers is among the files of the other.

    Two files in use may differ, even if next to both of them there is a third one.
    """
    ours, theirs = hashes_of(first), hashes_of(second)
    return ours[0] in theirs or theirs[0] in ours


def _other_formats(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the hash of each file next to a tokenizer's that has the same pieces; an unrelated one has others."""
    for model in tokenizer.files[:1]:
        for kind in TOKENIZER_KINDS:
            for path in map(model.with_name, kind.files):
                if path.name != model.name and path.exists():
                    with contextlib.suppress(UserError):
                        other = kind.load(path)
                        if other.pieces() == tokenizer.pieces():
                            yield other.sha256


def check_parses_special_tokens(field_name: str, tokenizer: Tokenizer) -> None:
    """Raise UserError if a field about spellings of special tokens has no effect."""
    if not tokenizer.special_tokens:
        reason = "{}: {kind} finds no special token in a text"
        raise UserError(Problem({field_name: None}, reason, "leave it out", kind=tokenizer.kind))


TIKTOKEN_FILE = "tiktoken.model"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
"""A line of tiktoken's files: the bytes of a token in base64, and its id."""


def read_model_file(model: Path, expected: str) -> bytes:
    """Return the content of --tokenizer-model; raises UserError if it is missing or a file of tiktoken."""
    content = read_if_exists(model)
    tiktoken_file = model
    tiktoken_content = content
    if content is None and model.is_dir():
        tiktoken_file = model / TIKTOKEN_FILE
        tiktoken_content = read_if_exists(tiktoken_file)
    if _TIKTOKEN_LINE.match(tiktoken_content or b""):
        fix = (
            'convert it (pip install tiktoken; python -c "from transformers import AutoTokenizer; '
            "AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\"), and pass HuggingFaceTokenizer "
            "the tokenizer.json"
        )
        reason = "{}: is a file of tiktoken, expected {expected}"
        problem = Problem(
            {"tokenizer_model": tiktoken_file}, reason, fix, expected=expected, folder=tiktoken_file.parent
        )
        raise UserError(problem)
    if content is None:
        found = "is a directory" if model.is_dir() else "no such file"
        expected += hub_hint(model)
        raise UserError(
            Problem({"tokenizer_model": model}, "{}: {found}, expected {expected}", found=found, expected=expected)
        )
    return content
