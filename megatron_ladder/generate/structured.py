"""Structured output: restrict the tokens of a sample to texts that a grammar of llguidance allows.

Every rank has a matcher for each sample. The ranks choose the same tokens, so their matchers agree without
communication, and each rank masks its own part of the vocabulary.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError


class TokenMatcher(Protocol):
    """The tokens that may follow, of one sample."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask [V or less] of the tokens that may come next; later tokens are not allowed."""

    def consume(self, token: int) -> None:
        """Continue after a token that was allowed."""


class _GrammarMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> NDArray[np.bool_]:
        # After the end of the grammar, and after an error, only the end-of-text tokens.
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little").view(np.bool_)

    def consume(self, token: int) -> None:
        self._matcher.consume_token(token)


def new_matcher(grammar: str, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> TokenMatcher:
    """Return a matcher at the beginning of a text; `grammar` is one of `json_grammar`."""
    import llguidance

    library_tokenizer = _library_tokenizer(cast(Any, tokenizer), eos_ids)
    return _GrammarMatcher(llguidance.LLMatcher(library_tokenizer, grammar, log_level=0))


def json_grammar(schema: Mapping[str, Any], tokenizer: Tokenizer, eos_ids: frozenset[int]) -> str:
    """Return the grammar of JSON with a schema; raises UserError if it is not supported, or llguidance is missing."""
    try:
        import llguidance
    except ImportError:
        raise UserError("this needs the package llguidance on the server; run: pip install llguidance") from None
    if tokenizer.eod_id not in eos_ids:
        raise UserError("an end-of-text token must end the text; remove ignore_eos")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        # At most one space between two tokens of JSON: a weak model could otherwise write spaces without end.
        json.dumps(schema), overrides={"whitespace_flexible": True, "whitespace_pattern": "[ ]?"}
    )  # fmt: skip
    if error := llguidance.LLMatcher.validate_grammar(grammar, _library_tokenizer(cast(Any, tokenizer), eos_ids)):
        raise UserError(error)
    return grammar


@functools.cache
def _library_tokenizer(tokenizer: Tokenizer, eos_ids: frozenset[int]) -> Any:
    import llguidance

    class Description:
        """The attributes that llguidance reads."""

        eos_token_id, bos_token_id = tokenizer.eod_id, None
        tokens: Sequence[bytes]
        special_token_ids: Sequence[int]

        def __call__(self, text: str) -> list[int]:
            return tokenizer.encode(text)

    description, ids = Description(), range(tokenizer.vocab_size)
    description.tokens = [tokenizer.token_bytes(number) for number in ids]
    description.special_token_ids = [number for number in ids if not description.tokens[number]]
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(description),
        # A model's vocabulary may be larger than its tokenizer's.
        eos_token=sorted(number for number in eos_ids if number in ids),
        slices=llguidance.LLTokenizer.json_slices(),
    )
