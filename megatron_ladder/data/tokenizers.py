"""Tokenizers behind one protocol, their selection by flags, and the copies of them that checkpoints contain.

Ids are those of the text alone: no tokenizer adds a beginning-of-sequence token.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

import msgspec
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, normalizers

from megatron_ladder.config.sections import TokenizerType
from megatron_ladder.data.special_tokens import RenamedTokenizer, SpelledTokenEncoder, rename_tokens
from megatron_ladder.errors import UserError
from megatron_ladder.files import hub_hint, read_if_exists
from megatron_ladder.typed import json_object, read_json, typed

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
    special_tokens: tuple[str, ...] = ()
    """Tokens whose spelling `encode` converts to them, and which do not belong in a document."""
    control_tokens: Mapping[int, str] = MappingProxyType({})
    """The spelling of each control token that has one; `decode` leaves these tokens out."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; none for an empty one."""

    def encode_documents(self, texts: Sequence[str], parse_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text; the spelling of a special token is text unless `parse_special_tokens` is set."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; control tokens give no text, and incomplete characters give U+FFFD."""

    def named_tokens(self) -> dict[str, str]:
        """Return special tokens by their names in transformers, such as `eos_token`."""
        return {}

    def added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that transformers puts before and after a text, with the tokenizer's files."""
        return (), ()

    @property
    def flag(self) -> str:
        """The flag that selects it, for messages."""
        return f"--tokenizer-model {self.files[0]}" if self.files else f"--tokenizer-type {self.kind}"


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
        content = _read_model_file(model, "a SentencePiece .model file")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            fix = ": is JSON: use --tokenizer-type HuggingFaceTokenizer" if content.lstrip().startswith(b"{") else ""
            raise UserError(f"--tokenizer-model {model}: not a SentencePiece model{fix}") from None
        self.files = (model,)
        self.contents = (content,)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.eod_id: int = self._processor.eos_id()
        if self.eod_id < 0:
            raise UserError(f"--tokenizer-model {model}: has no end-of-sequence piece: train it with an eos_id")
        self.bos_id = self._processor.bos_id() if self._processor.bos_id() >= 0 else None
        control = filter(self._processor.is_control, range(self.vocab_size))
        self.control_tokens = {number: self._processor.id_to_piece(number) for number in control}

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(number) for number in ids]))

    def named_tokens(self) -> dict[str, str]:
        ids = {"bos": self._processor.bos_id(), "eos": self.eod_id, "unk": self._processor.unk_id()}
        return {f"{name}_token": self._processor.id_to_piece(number) for name, number in ids.items() if number >= 0}

    def as_json(self) -> str:
        """Return the content of a tokenizer.json that gives the same ids if it does not recognise special tokens.

        Raises UserError with a text for which `tokenizers` gives other ids.
        """
        model = sentencepiece_model_pb2.ModelProto.FromString(self.contents[0])
        problem = f"{self.files[0]}: cannot be exported: transformers"
        fix = "use the model with tools/generate.py"
        if model.trainer_spec.model_type not in (model.trainer_spec.UNIGRAM, model.trainer_spec.BPE):
            raise UserError(f"{problem} reads only unigram and BPE models: {fix}")
        library = tokenizers.Tokenizer(_library_model(model))
        # Normalization, which the decoder reverts.
        written = model.normalizer_spec
        space = "\u2581"
        steps: list[Any] = [normalizers.Replace(" ", space)]
        decoded: list[Any] = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
        if written.add_dummy_prefix:
            steps.insert(0, normalizers.Prepend(space))
            decoded.append(decoders.Strip(" ", 1, 0))
        if written.remove_extra_whitespaces:
            trim = normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), "")
            steps[:0] = [trim, normalizers.Replace(tokenizers.Regex(" +"), " ")]
        if written.precompiled_charsmap:
            steps.insert(0, normalizers.Precompiled(written.precompiled_charsmap))
        library.normalizer = normalizers.Sequence(steps)
        library.decoder = decoders.Sequence(decoded)
        # Pieces that are found in a text before it is encoded.
        symbols = sorted((piece.piece for piece in model.pieces if piece.type == piece.USER_DEFINED), key=len)
        if symbols and model.trainer_spec.model_type == model.trainer_spec.BPE:
            pattern = tokenizers.Regex("|".join(map(re.escape, reversed(symbols))))
            library.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
            library.model.ignore_merges = True
        library.add_special_tokens([piece.piece for piece in model.pieces if piece.type == piece.CONTROL])
        library.encode_special_tokens = True
        # Both libraries must agree.
        probes = _probes(model)
        encodings = library.encode_batch(probes, add_special_tokens=False)
        for text, ours, theirs in zip(probes, self._processor.encode(probes), encodings, strict=True):
            if ours != theirs.ids:
                raise UserError(
                    f"{problem} would encode {text[:80]!r} as {theirs.ids[:16]}, training as {ours[:16]}: {fix}"
                )
        return library.to_str(pretty=True)


_PROBES = ("", " ", "  a  a ", "\n\ta\r\n", "\U0001f389\ufeff\u200d a\u00a0b", "a\u2581 \u2581\u2581b")
"""Texts with blanks and unknown characters."""
_PROBED_LINES = 2000
_NEVER = -1e6
"""Score of a piece that is not found in texts."""


def _probes(model: sentencepiece_model_pb2.ModelProto) -> list[str]:
    """Return texts with every piece of a model, alone and between others, and the text of its training if it exists."""
    pieces = [piece.piece.replace("\u2581", " ") for piece in model.pieces]
    texts = [*_PROBES, *pieces, *("".join(pieces[begin : begin + 8]) for begin in range(0, len(pieces), 8))]
    for path in map(Path, model.trainer_spec.input):
        if path.is_file():
            with open(path, encoding="utf-8", errors="replace") as lines:
                texts += [line.rstrip("\n") for line in itertools.islice(lines, _PROBED_LINES)]
    return texts


def _library_model(model: sentencepiece_model_pb2.ModelProto) -> Any:
    """Return the pieces of a SentencePiece model as a model of `tokenizers`.

    Only normal pieces are merged or found in a text; user-defined symbols always are.
    """
    trained = model.trainer_spec
    pieces = model.pieces
    scores = {piece.piece: piece.score for piece in pieces if piece.type == piece.NORMAL}
    if trained.model_type == trained.UNIGRAM:
        best = max(scores.values())
        scores |= {piece.piece: len(piece.piece) * best - 0.1 for piece in pieces if piece.type == piece.USER_DEFINED}
        scored = [(piece.piece, scores.get(piece.piece, _NEVER)) for piece in pieces]
        return tokenizers.models.Unigram(scored, trained.unk_id, trained.byte_fallback)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    vocabulary = {piece.piece: number for number, piece in enumerate(pieces)}
    unknown = {"unk_token": pieces[trained.unk_id].piece, "fuse_unk": True, "byte_fallback": trained.byte_fallback}
    return tokenizers.models.BPE(vocabulary, merges, **unknown)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library, or a directory that contains one."""

    kind = "HuggingFaceTokenizer"

    _COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
    """Files next to tokenizer.json that may name the end-of-sequence token."""

    def __init__(self, model: Path, eod_token: str | None = None) -> None:
        """Raises UserError if the file is missing, is not a tokenizer.json, or has no end-of-document token.

        `eod_token` becomes the `eos_token` of the copies of its files.
        """
        path = model / "tokenizer.json"
        content = None
        if model.suffix != ".json":
            content = read_if_exists(path)
        if content is None:
            path = model
            content = _read_model_file(path, "a tokenizer.json, or a directory that contains one")
        try:
            library = tokenizers.Tokenizer.from_buffer(content)
        except Exception:  # The library raises nothing narrower.
            reason = f"the package tokenizers {tokenizers.__version__} cannot read it, and a newer one might"
            try:
                read_json(content)
            except ValueError as error:
                reason = str(error)
                with contextlib.suppress(RuntimeError):
                    sentencepiece.SentencePieceProcessor(model_proto=content)
                    reason = "is a SentencePiece model: use --tokenizer-type SentencePieceTokenizer"
            raise UserError(f"--tokenizer-model {path}: not a tokenizer.json: {reason}") from None
        companions = [path.with_name(name) for name in (*self._COMPANIONS, "chat_template.jinja")]
        companion_contents = {file: read_if_exists(file) for file in companions}
        if eod_token is not None:
            settings = json_object(companions[0], companion_contents[companions[0]] or b"{}")
            settings["eos_token"] = eod_token
            companion_contents[companions[0]] = (json.dumps(settings, indent=2) + "\n").encode()
        contents = {path: content} | {file: text for file, text in companion_contents.items() if text is not None}
        self.files = tuple(contents)
        self.contents = tuple(contents.values())
        self.sha256 = hashlib.sha256(content).hexdigest()
        # Padding and truncation are settings for batches of a fixed length; here they would change documents.
        library.no_padding()
        library.no_truncation()
        self._tokenizer = library
        self._added = library.get_added_tokens_decoder()
        self.control_tokens = {number: token.content for number, token in self._added.items() if token.special}
        vocabulary = library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"--tokenizer-model {path}: has an empty vocabulary")
        if eod_token is not None and eod_token not in vocabulary:
            raise UserError(f"--eod-token {eod_token}: is not in the vocabulary of {path}")
        self.vocab_size = max(vocabulary.values()) + 1
        beginnings = [token for _, token in self._named("bos_token") if isinstance(token, str) and token in vocabulary]
        self.bos_id = vocabulary[beginnings[0]] if beginnings else None
        self.eod_id = self._find_eod(vocabulary)
        self.special_tokens = tuple(
            token.content for number, token in self._added.items() if token.special or number == self.eod_id
        )
        self.added_tokens = tuple(token.content for token in self._added.values())
        """Special tokens, and others that are found in a text before it is encoded, such as `<think>`."""

    def named_tokens(self) -> dict[str, str]:
        return {"eos_token": str(self._tokenizer.id_to_token(self.eod_id))}

    def added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        begins = (begin for begin in range(len(whole)) if whole[begin : begin + len(plain)] == plain)
        begin = next(begins, 0)
        return tuple(whole[:begin]), tuple(whole[begin + len(plain) :])

    def without_added(self) -> bytes:
        """Return a tokenizer.json with which transformers adds no tokens to a text."""
        settings = json.loads(self.contents[0])
        processor = settings["post_processor"]
        steps = processor["processors"] if processor["type"] == "Sequence" else [processor]
        byte_steps = [step for step in steps if step["type"] == "ByteLevel"]
        settings["post_processor"] = {"type": "Sequence", "processors": byte_steps} if byte_steps else None
        return json.dumps(settings, indent=2, ensure_ascii=False).encode()

    def _named(self, kind: str) -> Iterator[tuple[Path, object]]:
        """Yield each companion file that names a special token, with its text, or an invalid value."""
        for companion, content in zip(self.files, self.contents, strict=True):
            if companion.name in self._COMPANIONS:
                token = json_object(companion, content).get(kind)
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
            f"{' '.join(_COMMON_END_TOKENS)} is in the vocabulary): give --eod-token, or name it as "
            f"eos_token in {self.files[0].with_name(self._COMPANIONS[0])}"
        )

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_documents(self, texts: Sequence[str], parse_special_tokens: bool) -> list[list[int]]:
        library = self._tokenizer if parse_special_tokens else self._without_special.library
        return [encoding.ids for encoding in library.encode_batch_fast(list(texts), add_special_tokens=False)]

    @functools.cached_property
    def _without_special(self) -> RenamedTokenizer:
        return rename_tokens(self._tokenizer, self.special_tokens)

    @functools.cached_property
    def _spelled(self) -> SpelledTokenEncoder:
        return SpelledTokenEncoder(self._tokenizer)

    def encode_with_offsets(
        self, texts: Sequence[str], spelled: Sequence[Sequence[int]]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of each text, and the first character and the end of each of them.

        An added token that contains one of the positions `spelled`, in order, of its text is encoded as text.
        """
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            self._spelled.encode(text, encoding, places) if places else (encoding.ids, encoding.offsets)
            for text, encoding, places in zip(texts, encodings, spelled, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=True)


_SYNONYMS = {
    "Llama2Tokenizer": SentencePieceTokenizer.kind,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer.kind,
    "HFTokenizer": HuggingFaceTokenizer.kind,
}
_WITHOUT_FILES = (ByteTokenizer.kind, NullTokenizer.kind)


def load_tokenizer(
    tokenizer_type: str,
    tokenizer_model: Path | None = None,
    vocab_size: int | None = None,
    eod_token: str | None = None,
) -> Tokenizer:
    """Load the tokenizer that the flags select; `vocab_size` is that of NullTokenizer.

    Raises UserError for an unknown type, a missing flag or an unreadable file.
    """
    known = get_args(TokenizerType)
    if tokenizer_type not in known:
        raise UserError(f"--tokenizer-type {tokenizer_type}: expected one of {', '.join(known)}")
    kind = _SYNONYMS.get(tokenizer_type, tokenizer_type)
    if eod_token is not None and kind != HuggingFaceTokenizer.kind:
        raise UserError(f"--eod-token {eod_token}: {kind} has its own end-of-document token: leave it out")
    if kind in _WITHOUT_FILES and tokenizer_model is not None:
        raise UserError(f"--tokenizer-model {tokenizer_model}: {kind} has no file: leave it out")
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind == NullTokenizer.kind:
        if vocab_size is None:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(vocab_size)
    if tokenizer_model is None:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
    if kind == SentencePieceTokenizer.kind:
        return SentencePieceTokenizer(tokenizer_model)
    return HuggingFaceTokenizer(tokenizer_model, eod_token)


def check_parses_special_tokens(flag: str, tokenizer: Tokenizer) -> None:
    """Raise UserError if a flag about spellings of special tokens has no effect."""
    if not tokenizer.special_tokens:
        raise UserError(f"{flag}: {tokenizer.kind} finds no special token in a text: leave it out")


class _Description(msgspec.Struct):
    """The content of DESCRIPTION_FILE."""

    format_version: Literal[1]
    tokenizer_type: str
    file: str | None
    sha256: str
    vocab_size: int


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return file names and contents for a copy of the tokenizer: its files as loaded, and a description of them."""
    model = tokenizer.files[0].name if tokenizer.files else None
    description = _Description(1, tokenizer.kind, model, tokenizer.sha256, tokenizer.vocab_size)
    contents = {file.name: content for file, content in zip(tokenizer.files, tokenizer.contents, strict=True)}
    return contents | {DESCRIPTION_FILE: (json.dumps(msgspec.to_builtins(description), indent=2) + "\n").encode()}


def find_tokenizer(directory: Path) -> Tokenizer | None:
    """Load the tokenizer of a model's directory: the described one, or else the first of Hugging Face's files."""
    if (directory / DESCRIPTION_FILE).exists():
        return load_tokenizer_from_directory(directory)
    kinds = {"tokenizer.json": HuggingFaceTokenizer.kind, "tokenizer.model": SentencePieceTokenizer.kind}
    # Raises an error that names the way to convert it.
    kinds[_TIKTOKEN_FILE] = HuggingFaceTokenizer.kind
    return next(
        (load_tokenizer(kind, directory / name) for name, kind in kinds.items() if (directory / name).exists()), None
    )


def load_tokenizer_from_directory(directory: Path) -> Tokenizer:
    """Load a copy that consists of `tokenizer_files`; raises UserError if it is missing or its files have changed."""
    path = directory / DESCRIPTION_FILE
    content = read_if_exists(path)
    if content is None:
        raise UserError(f"{path}: no such file: {directory} contains no tokenizer")
    try:
        description = typed(read_json(content), _Description)
    except ValueError as error:
        raise UserError(f"{path}: {error}: copy the tokenizer again") from None
    model = directory / Path(description.file).name if description.file else None
    tokenizer = load_tokenizer(description.tokenizer_type, model, description.vocab_size - 1)
    if tokenizer.sha256 != description.sha256:
        changed = tokenizer.files[0] if tokenizer.files else path
        raise UserError(
            f"{changed}: sha256 is {tokenizer.sha256}, {path.name} expects {description.sha256}: "
            "copy the tokenizer again"
        )
    return tokenizer


_TIKTOKEN_FILE = "tiktoken.model"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
"""A line of tiktoken's files: the bytes of a token in base64, and its id."""


def _read_model_file(model: Path, expected: str) -> bytes:
    content = read_if_exists(model)
    tiktoken_file = model
    tiktoken_content = content
    if content is None and model.is_dir():
        tiktoken_file = model / _TIKTOKEN_FILE
        tiktoken_content = read_if_exists(tiktoken_file)
    if _TIKTOKEN_LINE.match(tiktoken_content or b""):
        folder = tiktoken_file.parent
        raise UserError(
            f"--tokenizer-model {tiktoken_file}: is a file of tiktoken, expected {expected}: convert it "
            '(pip install tiktoken; python -c "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('
            f"'{folder}').save_pretrained('{folder}')\"), and pass HuggingFaceTokenizer the tokenizer.json"
        )
    if content is None:
        problem = "is a directory" if model.is_dir() else "no such file"
        raise UserError(f"--tokenizer-model {model}: {problem}, expected {expected}{hub_hint(model)}")
    return content
