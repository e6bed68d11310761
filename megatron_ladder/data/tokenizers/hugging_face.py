"""Tokenizers that the `tokenizers` library runs: a tokenizer.json, or GPT-2's pair of files."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from megatron_ladder.data.tokenizers.protocol import parse_json_object, read_model_file
from megatron_ladder.errors import UserError

USUAL_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")
"""Looked for, in this order, when no companion names the token that ends a document."""


class HuggingFaceTokenizer:
    """A tokenizer.json of the `tokenizers` library, or a directory that holds one."""

    kind = "HuggingFaceTokenizer"

    COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
    """Files beside tokenizer.json that may name the end-of-sequence token."""
    CHAT_TEMPLATE = "chat_template.jinja"
    """File beside tokenizer.json that a copy needs as well."""

    def __init__(self, model: Path) -> None:
        """
        Raises:
            UserError: when the file is missing, is no tokenizer.json, or no token that ends a document is
                found.
        """
        path = model / "tokenizer.json" if model.is_dir() else model
        content = read_model_file("--tokenizer-model", path, "a tokenizer.json, or a directory that holds one")
        try:
            library = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # The library raises nothing narrower.
            raise UserError(f"--tokenizer-model {path}: not a tokenizer.json ({error})") from None
        beside = [path.with_name(name) for name in (*self.COMPANIONS, self.CHAT_TEMPLATE)]
        contents = {path: content} | {file: file.read_bytes() for file in beside if file.is_file()}
        self._take(library, contents, hashlib.sha256(content).hexdigest())

    def _take(self, library: tokenizers.Tokenizer, contents: Mapping[Path, bytes], sha256: str) -> None:
        # Padding and truncation are settings for batches of a fixed length; here they would change documents.
        library.no_padding()
        library.no_truncation()
        self._tokenizer = library
        self.files: tuple[Path, ...] = tuple(contents)
        self.contents: tuple[bytes, ...] = tuple(contents.values())
        self.sha256 = sha256
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = self._find_eod(vocabulary)

    def _find_eod(self, vocabulary: dict[str, int]) -> int:
        for companion, content in zip(self.files, self.contents, strict=True):
            if companion.name not in self.COMPANIONS:
                continue
            token = parse_json_object(companion, content).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and token not in vocabulary:
                raise UserError(f"{companion}: eos_token {token!r} is not in the vocabulary of {self.files[0]}")
            if token is not None:
                return vocabulary[token]
        for token in USUAL_ENDS:
            if token in vocabulary:
                return vocabulary[token]
        raise UserError(
            f"--tokenizer-model {self.files[0]}: which token ends a document is not known (none of "
            f"{' '.join(USUAL_ENDS)} is in the vocabulary): name it as eos_token in "
            f"{self.files[0].with_name(self.COMPANIONS[0])}"
        )

    def as_json(self) -> str:
        """The tokenizer as the content of a tokenizer.json, without padding and truncation."""
        return self._tokenizer.to_str()

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


class GPT2BPETokenizer(HuggingFaceTokenizer):
    """GPT-2's byte-pair encoding from its vocab.json and merges.txt."""

    kind = "GPT2BPETokenizer"

    END = "<|endoftext|>"

    def __init__(self, vocab_file: Path, merge_file: Path | None = None) -> None:
        """
        Args:
            merge_file: the merges.txt beside the vocabulary if not given.

        Raises:
            UserError: when a file is missing, they do not belong together, or <|endoftext|> is not among the
                tokens.
        """
        merge_file = vocab_file.with_name("merges.txt") if merge_file is None else merge_file
        contents = (
            read_model_file("--vocab-file", vocab_file, "GPT-2's vocab.json"),
            read_model_file("--merge-file", merge_file, "GPT-2's merges.txt"),
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
            raise UserError(f"--vocab-file {vocab_file}: {self.END}, which ends a document, is not in it")
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        library.add_special_tokens([self.END])
        # The files' names are the user's, and their contents one after the other leave no doubt where one ends.
        sha256 = hashlib.sha256(contents[0] + contents[1]).hexdigest()
        self._take(library, dict(zip((vocab_file, merge_file), contents, strict=True)), sha256)

    def _find_eod(self, vocabulary: dict[str, int]) -> int:
        return vocabulary[self.END]
