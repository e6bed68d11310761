"""The messages that docs/troubleshooting.md quotes are those of the sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
TELLING = 12
"""Characters of a literal that make it one message's, and not of several."""
OF_OTHERS = ("OutOfMemoryError", "the stacks of its threads")
"""What torch prints, and what stands for more lines."""


def quoted(text: str) -> Iterator[str]:
    """Messages in the first cells of tables, and in indented lines."""
    for line in text.splitlines():
        if line.startswith("    "):
            yield line.strip()
        elif line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


def is_message(words: str) -> bool:
    """Whether it is a sentence of ours, and not a flag, a place in a trace, or left out."""
    shown = [word for word in words.split() if re.fullmatch(r"[a-z(']+[a-z):,;']+", word)]
    return len(shown) > 2 and not any(other in words for other in OF_OTHERS)


def literals() -> set[str]:
    """The fixed pieces of all strings of the package that are not docstrings."""
    pieces = set()
    for path in [*(ROOT / "megatron_ladder").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        words = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in words:
                pieces |= {piece.strip(" :;,()") for piece in re.split(r"\{\w*\}|\n", node.value)}
    # A flag's name is in many messages.
    return {piece for piece in pieces if len(piece) >= TELLING and " " in piece}


def foreign(messages: list[str], pieces: set[str]) -> list[str]:
    """Messages that have no piece of a literal in them, and that no literal has in it, between two `...`."""
    strange = []
    for words in messages:
        shown = [part.strip(" :;,()") for part in words.split("...")]
        shown = [part for part in shown if len(part) >= TELLING and " " in part]
        if not any(piece in words or any(part in piece for part in shown) for piece in pieces):
            strange.append(words)
    return strange


def test_every_quoted_message_is_printed_by_the_package() -> None:
    messages = [words for words in quoted(PAGE.read_text(encoding="utf-8")) if is_message(words)]
    assert len(messages) > 30
    assert foreign(messages, literals()) == []
