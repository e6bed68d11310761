"""What every tokenizer offers, and how their files are read.

Ids are those of the text alone: nothing puts a beginning-of-sequence token in front.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_ladder.errors import UserError


class Tokenizer(Protocol):
    """Text to ids and back."""

    kind: str
    """The --tokenizer-type that loads it again."""
    files: tuple[Path, ...]
    """What a copy needs; the first is the --tokenizer-model. A tokenizer without a vocabulary has none."""
    contents: tuple[bytes, ...]
    """Of each file, as it was when the tokenizer was read: the file itself may be gone or another by now."""
    sha256: str
    """Of what decides the ids: equal ones give equal ids."""
    vocab_size: int
    """One more than the largest id."""
    eod_id: int
    """What ends a document, and a generated text."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; none for an empty one."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens give none, and bytes that are no whole character give U+FFFD."""


def read_model_file(flag: str, model: Path, expected: str) -> bytes:
    """Content of a tokenizer's file.

    Raises:
        UserError: when there is none; it names the flag and what was expected.
    """
    if not model.is_file():
        found = "is a directory" if model.is_dir() else "no such file"
        raise UserError(f"{flag} {model}: {found}, expected {expected}")
    return model.read_bytes()


def read_json_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object; UserError for any other content."""
    return parse_json_object(path, path.read_bytes())


def parse_json_object(path: Path, content: bytes) -> dict[str, Any]:
    """The JSON object that is the content of a file; UserError, which names the file, for any other content."""
    try:
        values = json.loads(content)
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: a JSON object expected, a {type(values).__name__} found")
    return values
