"""Byte-level byte-pair tokenizers on tiktoken."""

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from megatron_ladder.data.encoders.byte_pairs import read_byte_pairs
from megatron_ladder.data.encoders.protocol import NotExpressible
from megatron_ladder.data.tokenizers import HuggingFaceTokenizer, Tokenizer


class TiktokenEncoder:
    """A tokenizer.json, or GPT-2's files, on tiktoken."""

    library = "tiktoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises NotExpressible when the library is missing, or cannot do this tokenizer's work."""
        try:
            import tiktoken
        except ImportError:
            raise NotExpressible("not installed (pip install tiktoken)") from None
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise NotExpressible(f"knows nothing of a {tokenizer.kind}")
        pairs = read_byte_pairs(tokenizer.as_json())
        try:
            self._encoding = tiktoken.Encoding(
                tokenizer.sha256, pat_str=pairs.pattern, mergeable_ranks=pairs.ranks, special_tokens=pairs.special
            )
        except Exception as error:  # Of a pattern that its regular expressions do not have; it raises nothing narrower.
            raise NotExpressible(f"refuses it ({error})") from None

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[Any]]:
        """Ids of each text."""
        encode = self._encoding.encode_to_numpy
        return (encode(text, allowed_special="all", disallowed_special=()) for text in texts)
