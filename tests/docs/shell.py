"""Splits the text of a bash fence into commands; supports the part of the language that the pages use."""

import re
import shlex
from collections.abc import Iterator

OPEN_END = "..."
"""Represents further arguments that a page omits."""

_KEYWORDS = {"do", "then", "else", "{", "}", "!", "time", "exec", "if", "while", "done", "fi"}
_SEPARATORS = set(";&|()")
_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*\+?=")


def commands(text: str) -> list[list[str]]:
    """Return the words of each simple command, without leading assignments, redirections and comments."""
    found = []
    for line in _logical_lines(text):
        for words in _split(_tokens(line)):
            while words and (words[0] in _KEYWORDS or _ASSIGNMENT.match(words[0])):
                words = words[1:]
            if words and words[0] != "for":
                found.append(words)
    return found


def _logical_lines(text: str) -> Iterator[str]:
    """Iterate over lines, joined with their continuations; bodies of here-documents are skipped."""
    lines = iter(text.split("\n"))
    for first in lines:
        line = first
        while line.endswith("\\") or not _is_whole(line):
            line = (line[:-1] if line.endswith("\\") else line + "\n") + next(lines)
        yield line
        here = re.search(r"<<-?\s*['\"]?(\w+)", line)
        if here:
            while next(lines).strip() != here[1]:
                pass


def _is_whole(line: str) -> bool:
    try:
        _tokens(line)
    except ValueError:
        return False
    return True


def _tokens(line: str) -> list[str]:
    # Values of variables and commands are unknown here.
    opaque = re.sub(r"\$\([^()]*\)|\$\{[^{}]*\}|\$\w+|\$@", "1", line)
    opaque = re.sub(r"(?<=\s)[0-9]?&?>>?\s*(&[0-9]|[^\s;|&]+)|(?<=\s)<<?-?\s*[^\s;|&]+", "", opaque)
    lexer = shlex.shlex(opaque, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    return list(lexer)


def _split(tokens: list[str]) -> Iterator[list[str]]:
    words: list[str] = []
    for token in tokens:
        if set(token) <= _SEPARATORS and token:
            yield words
            words = []
        else:
            words.append(token)
    yield words
