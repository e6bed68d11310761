"""Structured output: restrict the tokens of a sample to texts that a grammar of llguidance allows.

Every rank has a matcher for each sample. The ranks choose the same tokens, so their matchers agree without
communication, and each rank masks its own part of the vocabulary.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.errors import UserError

_LARGEST_GRAMMAR = 1 << 16
"""Characters."""
_COMPILE = """
import resource, sys, llguidance
resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))
matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), sys.stdin.read(), log_level=0)
matcher.compute_bitmask()
print(matcher.get_error())
"""
"""A program that compiles a grammar: some small schemas take hours, and the library cannot be interrupted."""
_COMPILE_SECONDS = 20.0
"""Time for that program on a busy machine."""


class TokenMatcher:
    """The tokens that may come next in one sample; equal on every rank that consumes the same tokens."""

    def __init__(self, grammar: str, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        """Begin a text; `grammar` is one of `json_grammar`."""
        self._matcher = _compiled(grammar, cast(Any, tokenizer), eos_ids).deep_copy()
        # Whether no token can come next: the grammar exceeds the library's limits, or needs other characters than the
        # vocabulary has.
        self.failed = False

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask [V or less] of the tokens that may come next; later tokens are not allowed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little").view(np.bool_)
        self.failed = self._matcher.is_error() or not mask.any()
        # The library allows the end of the text after an error.
        return np.zeros_like(mask) if self.failed else mask

    def consume(self, token: int) -> None:
        """Continue after a token."""
        self._matcher.consume_token(token)


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
        json.dumps(schema),
        overrides={"whitespace_flexible": True, "whitespace_pattern": "[ ]?"},
    )
    if len(grammar) > _LARGEST_GRAMMAR:
        raise UserError(f"the schema is larger than {_LARGEST_GRAMMAR} characters")
    if error := _compile_error(grammar):
        raise UserError(error)
    return grammar


@functools.lru_cache(maxsize=64)
def _compile_error(grammar: str) -> str:
    try:
        words = [sys.executable, "-P", "-c", _COMPILE]
        done = subprocess.run(words, input=grammar, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        # Raised, because a result would be cached, and the machine may have been busy.
        raise UserError("the schema takes too long to compile") from None
    return done.stdout.strip() if done.returncode == 0 else "the schema takes too much time or memory to compile"


@functools.lru_cache(maxsize=8)
def _compiled(grammar: str, tokenizer: Any, eos_ids: frozenset[int]) -> Any:
    """Return a matcher to copy, because compiling a grammar for each sample would delay all others."""
    import llguidance

    return llguidance.LLMatcher(_library_tokenizer(tokenizer, eos_ids), grammar, log_level=0)


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
