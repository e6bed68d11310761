"""Byte-pair tokenizers on gigatoken, which keeps the ids of every word that it has met."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
from numpy.typing import NDArray

from megatron_ladder.data.encoders.protocol import NotExpressible
from megatron_ladder.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

CACHE_BYTES = 192 << 20
"""gigatoken's memory of words grows without end; at this size it is thrown away and begins anew."""

CHECK_CHARACTERS = 8 << 20
"""Between two looks at its size."""


class GigatokenEncoder:
    """A tokenizer.json, GPT-2's files or a byte-pair SentencePiece model on gigatoken."""

    library = "gigatoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises NotExpressible when the library is missing, or cannot do this tokenizer's work."""
        try:
            import gigatoken
        except ImportError as error:
            raise NotExpressible(f"not installed (pip install gigatoken; {error})") from None
        if isinstance(tokenizer, HuggingFaceTokenizer):
            self._json = tokenizer.as_json()
        elif isinstance(tokenizer, SentencePieceTokenizer):
            self._json = _sentencepiece_json(tokenizer)
        else:
            raise NotExpressible(f"knows nothing of a {tokenizer.kind}")
        self._load: Any = gigatoken.Tokenizer.from_json
        self._process = psutil.Process()
        self._backend: Any = None
        try:
            self._begin_anew()
        except Exception as error:  # It raises nothing narrower for what it does not support.
            raise NotExpressible(f"refuses it ({error})") from None

    def _begin_anew(self) -> None:
        self._backend = None
        self._backend = self._load(self._json).backend
        self._begun_with = self._process.memory_info().rss
        self._unchecked = 0

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[Any]]:
        """Ids of each text."""
        self._unchecked += sum(map(len, texts))
        if self._unchecked > CHECK_CHARACTERS:
            self._unchecked = 0
            if self._process.memory_info().rss - self._begun_with > CACHE_BYTES:
                self._begin_anew()
        return map(self._backend.encode, texts)


def _sentencepiece_json(tokenizer: SentencePieceTokenizer) -> str:
    """The model as gigatoken writes it, less what would let a text spell a control token or a byte.

    SentencePiece never reads `<s>` or `<0x0A>` in a text as the piece of that name.
    """
    try:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json
    except ImportError as error:
        raise NotExpressible(f"has no reader of SentencePiece models in this release ({error})") from None
    try:
        values = json.loads(sentencepiece_to_tokenizer_json(tokenizer.files[0].read_bytes()))
    except ValueError as error:
        raise NotExpressible(str(error)) from None
    outside = tokenizer.pieces_outside_of_text()
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] not in outside]
    model = values["model"]
    model["merges"] = [(left, right) for left, right in model["merges"] if left + right not in outside]
    return json.dumps(values, ensure_ascii=False)
