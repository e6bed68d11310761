"""Tokenizers of the library `tokenizers`."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece
import tokenizers

from megatron_ladder.errors import Problem, UserError
from megatron_ladder.files import read_if_exists
from megatron_ladder.tokenizers.kinds import Tokenizer, read_model_file
from megatron_ladder.tokenizers.special_tokens import RenamedTokenizer, SpelledTokenEncoder, rename_tokens
from megatron_ladder.typed import json_object, read_json

_COMMON_END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")
"""Searched in this order if no companion file names the end-of-document token."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library, or a directory that contains one."""

    kind = "HuggingFaceTokenizer"
    finds_tokens = True

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
            content = read_model_file(path, "a tokenizer.json, or a directory that contains one")
        try:
            library = tokenizers.Tokenizer.from_buffer(content)
        except Exception:  # The library raises nothing narrower.
            why, fix = f"the package tokenizers {tokenizers.__version__} cannot read it, and a newer one might", ""
            try:
                read_json(content)
            except ValueError as error:
                why = str(error)
                with contextlib.suppress(RuntimeError):
                    sentencepiece.SentencePieceProcessor(model_proto=content)
                    why, fix = "is a SentencePiece model", "use {tokenizer_type} SentencePieceTokenizer"
            problem = Problem({"tokenizer_model": path}, "{}: not a tokenizer.json: {why}", fix, why=why)
            raise UserError(problem) from None
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
            raise UserError(Problem({"tokenizer_model": path}, "{}: has an empty vocabulary"))
        if eod_token is not None and eod_token not in vocabulary:
            raise UserError(Problem({"eod_token": eod_token}, "{}: is not in the vocabulary of {path}", path=path))
        self.vocab_size = max(vocabulary.values()) + 1
        beginnings = [token for _, token in self._named("bos_token") if isinstance(token, str) and token in vocabulary]
        self.bos_id = vocabulary[beginnings[0]] if beginnings else None
        self.eod_id = self._find_eod(vocabulary)
        self.special_tokens = tuple(
            token.content for number, token in self._added.items() if token.special or number == self.eod_id
        )
        self.added_tokens = tuple(token.content for token in self._added.values())

    def named_tokens(self) -> dict[str, str]:
        return {"eos_token": str(self._tokenizer.id_to_token(self.eod_id))}

    def added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        begins = (begin for begin in range(len(whole)) if whole[begin : begin + len(plain)] == plain)
        begin = next(begins, 0)
        return tuple(whole[:begin]), tuple(whole[begin + len(plain) :])

    def pieces(self) -> list[str]:
        return [str(self._tokenizer.id_to_token(number)) for number in range(self.vocab_size)]

    def as_json(self, adds_tokens: bool = True) -> bytes:
        if adds_tokens or not any(self.added_around()):
            return self.contents[0]
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
        reason = (
            f"{{}}: the end-of-document token is unknown (none of {' '.join(_COMMON_END_TOKENS)} is in the vocabulary)"
        )
        fix = "give {eod_token}, or name it as eos_token in {companion}"
        raise UserError(Problem(self.selection, reason, fix, companion=self.files[0].with_name(self._COMPANIONS[0])))

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
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            self._spelled.encode(text, encoding, places) if places else (encoding.ids, encoding.offsets)
            for text, encoding, places in zip(texts, encodings, spelled, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=True)
