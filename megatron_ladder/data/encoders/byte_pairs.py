"""A tokenizer.json in the terms of tiktoken: ranks of byte strings, a pattern, special tokens."""

import json
from typing import Any, NamedTuple

from megatron_ladder.data.encoders.protocol import NotExpressible

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""Cuts as the pattern that the ByteLevel pre-tokenizer has built in, and is quicker at it."""


class BytePairs(NamedTuple):
    """What decides the ids of a byte-level byte-pair tokenizer."""

    pattern: str
    """Regular expression whose matches are the words."""
    ranks: dict[bytes, int]
    """Id of every byte string; the pair with the lowest id of its union is merged first."""
    special: dict[str, int]
    """Id of every token that is looked for in the text before it is cut into words."""


def byte_alphabet() -> dict[str, int]:
    """The character by which a tokenizer.json writes each byte: itself where it can be printed, else 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def read_byte_pairs(content: str) -> BytePairs:
    """The byte pairs of a tokenizer.json.

    Raises:
        NotExpressible: the file has something that these terms have no place for.
    """
    values = json.loads(content)
    model = values["model"]
    if model.get("type") != "BPE":
        raise NotExpressible(f"its model is {model.get('type')}, not BPE")
    strange = [
        name
        for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        if model.get(name)
    ]
    if strange:
        raise NotExpressible(f"its model has {', '.join(strange)}")
    if values.get("normalizer") is not None:
        raise NotExpressible("it has a normalizer")
    special = _special_tokens(values.get("added_tokens") or [])
    return BytePairs(_pattern(values.get("pre_tokenizer")), _ranks(model, special), special)


def _special_tokens(added: list[dict[str, Any]]) -> dict[str, int]:
    special = {}
    for token in added:
        if token.get("single_word") or token.get("lstrip") or token.get("rstrip"):
            raise NotExpressible(f"its token {token['content']!r} takes in what is around it")
        special[token["content"]] = token["id"]
    for first in special:
        if any(other != first and other.startswith(first) for other in special):
            raise NotExpressible(f"its token {first!r} is the beginning of another")
    return special


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    last = steps[-1] or {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise NotExpressible("its pre-tokenizer does not end in ByteLevel without a prefix")
    if len(steps) == 1 and last.get("use_regex", True):
        return GPT2_PATTERN
    if len(steps) == 2 and not last.get("use_regex", True):
        first = steps[0]
        pattern = first.get("pattern", {}).get("Regex")
        if first.get("type") == "Split" and pattern and first.get("behavior") == "Isolated" and not first.get("invert"):
            return str(pattern)
    raise NotExpressible("its pre-tokenizer is not one pattern")


def _ranks(model: dict[str, Any], special: dict[str, int]) -> dict[bytes, int]:
    alphabet = byte_alphabet()
    ranks: dict[bytes, int] = {}
    for token, number in model["vocab"].items():
        if token in special:
            continue
        try:
            ranks[bytes(alphabet[character] for character in token)] = number
        except KeyError:
            raise NotExpressible(f"its token {token!r} is not written in bytes") from None
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise NotExpressible("its vocabulary lacks some of the 256 bytes")
    merged = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    numbers = [model["vocab"]["".join(pair)] for pair in merged]
    # tiktoken merges in the order of ids, and any two neighbours whose union it knows.
    if any(later <= earlier for earlier, later in zip(numbers, numbers[1:], strict=False)):
        raise NotExpressible("its merges are not in the order of their ids")
    if len(numbers) != len(ranks) - 256:
        raise NotExpressible("its vocabulary has tokens that no merge makes")
    return ranks
