"""Special tokens whose spelling occurs in a text: finds and counts them, and encodes the spelling as text.

A `tokenizer.json` extracts added tokens from a text before its model sees the rest. Without the extraction
(`encode_special_tokens`), a model whose vocabulary contains them still finds them: unigrams, words, and byte pairs with
`ignore_merges`. So a copy of the tokenizer, equal otherwise, has other texts for these ids, which nobody can guess:

    tokenizer       a </s> b  ->  a, </s>, b
    renamed copy    a </s> b  ->  a, <, /, s, >, b          a \\ue0005f...\\ue001 b  ->  a, </s>, b
"""

import bisect
import json
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import tokenizers

_SHOWN_TOKENS = 8
"""Special tokens that a message lists at most."""


class RenamedTokenizer(NamedTuple):
    """A tokenizer in which some tokens have other texts."""

    library: tokenizers.Tokenizer
    aliases: dict[str, str]
    """New text of each renamed token, by its former text."""


def rename_tokens(library: tokenizers.Tokenizer, names: Collection[str]) -> RenamedTokenizer:
    """Return a copy in which tokens have random texts; all ids are the same.

    Tokens that contain a renamed one are never merged: their texts contain its spelling, too.
    """
    key = secrets.token_hex(8)
    # Characters for private use, which normalizers leave as they are.
    aliases = {name: f"\ue000{key}.{number}\ue001" for number, name in enumerate(names)}
    settings = json.loads(library.to_str())
    model = settings["model"]
    vocabulary = model["vocab"]
    for token in settings["added_tokens"]:
        if token["content"] in aliases:
            # An alias is this token even inside a word: no text contains it by chance.
            token |= {"content": aliases[token["content"]], "single_word": False}
    if isinstance(vocabulary, dict):
        model["vocab"] = {aliases.get(text, text): number for text, number in vocabulary.items()}
    else:
        model["vocab"] = [(aliases.get(text, text), score) for text, score in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if aliases.keys().isdisjoint((*pair, "".join(pair)))]
    return RenamedTokenizer(tokenizers.Tokenizer.from_str(json.dumps(settings)), aliases)


class SpelledTokenEncoder:
    """Encodes texts in which some added tokens are spelled, and others are meant."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._added = library.get_added_tokens_decoder()
        self._renamed = rename_tokens(library, [token.content for token in self._added.values()])

    def encode(
        self, text: str, encoding: tokenizers.Encoding, spelled: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and the first character and the end of each.

        `encoding` is that of the library. An added token in it that contains one of the positions `spelled`, in order,
        is encoded as text; all others are replaced by their aliases, so that the library finds them again.
        """
        library, aliases = self._renamed
        replaced = ""
        end = 0
        # The beginning and the end in `text` of what each character of the replaced text stands for.
        begins, ends = list[int](), list[int]()
        for number, (begin, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._added.get(number)
            # A text may spell very many; their positions are in order.
            if token is None or bisect.bisect_left(spelled, begin) < bisect.bisect_left(spelled, stop):
                continue
            spelling = self._spelling_in(text[begin:stop], token.content)
            if spelling is None:
                # The model's token for unknown text.
                continue
            # A token may include white space, without which its normalized form would not be found.
            before, _, after = text[begin:stop].rpartition(spelling)
            alias = before + aliases[token.content] + after
            replaced += text[end:begin] + alias
            begins += [*range(end, begin), *[begin] * len(alias)]
            ends += [*range(end + 1, begin + 1), *[stop] * len(alias)]
            end = stop
        replaced += text[end:]
        begins += range(end, len(text) + 1)
        ends += range(end + 1, len(text) + 1)
        encoding = library.encode(replaced, add_special_tokens=False)
        offsets = [
            (begins[begin], ends[stop - 1] if stop > begin else begins[begin]) for begin, stop in encoding.offsets
        ]
        return encoding.ids, offsets

    def _spelling_in(self, text: str, token: str) -> str | None:
        """Return the part of a text that spells a token, before normalization; None if the text does not spell it."""
        normalizer = self._library.normalizer
        if token in text:
            return token
        if normalizer is not None and normalizer.normalize_str(token) in normalizer.normalize_str(text):
            return text.strip() or text
        return None


def spelling_pattern(names: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the spellings of tokens in a text, the longest first; None without tokens."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if names else None


def count_spelled(texts: Iterable[str], pattern: re.Pattern[str] | None) -> Counter[str]:
    """Return how often each token is spelled in some texts."""
    if pattern is None:
        return Counter()
    return Counter(spelling for text in texts for spelling in pattern.findall(text))


def list_tokens(tokens: Sequence[str], separator: str) -> str:
    """Join the first tokens for a message, with ` ...` for others."""
    others = " ..." if len(tokens) > _SHOWN_TOKENS else ""
    return separator.join(tokens[:_SHOWN_TOKENS]) + others


def mark_spelled(value: Any, pattern: re.Pattern[str] | None, mark: str) -> Any:
    """Return a JSON-able value with `mark` after the first character of each token that a text in it spells."""
    if isinstance(value, dict):
        return {key: mark_spelled(item, pattern, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mark_spelled(item, pattern, mark) for item in value]
    if isinstance(value, str) and pattern is not None:
        return pattern.sub(lambda match: f"{match[0][0]}{mark}{match[0][1:]}", value)
    return value
