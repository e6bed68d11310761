"""What a source of documents is: something that is cut into blocks, each of which can be read by itself.

Blocks are cut in one process and read in many. A source gives the same blocks each time it is asked.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megatron_ladder.errors import UserError

SPAN_BYTES = 1 << 20
"""About how much is read at once: what is parsed should be in the processor's cache still."""

GROUP_BYTES = 4 << 20
"""About how much is tokenised at once: parsing drives a library's words out of the processor's cache, so it should not
take turns with it too often; small enough for a lively progress line and little memory."""


class WrongInputError(UserError):
    """The input itself is wrong: reading it once more would come to the same."""


@dataclass(frozen=True)
class Reading:
    """What is taken of every record, and what is borne."""

    keys: tuple[str, ...] = ("text",)
    """Keys of a JSON object, or columns of a table."""
    texts_only: bool = True
    """Whether a value must be a text; otherwise any JSON value will do, and plain text cannot be read."""
    most_bytes: int = 64 << 20
    """Of one line, or one file of plain text."""
    most_bad: int = 0
    """Records that may be passed over because they cannot be read."""


class BadRecord(NamedTuple):
    """A record that cannot be read."""

    number: int
    """Of the line or row in its block, from 0."""
    reason: str


class Parsed(NamedTuple):
    """What a block holds."""

    columns: tuple[list[Any], ...]
    """For each key, the values of all records that can be read."""
    records: int
    """Lines or rows of the block, also those without a document: what numbers go on from in the next block."""
    bad: tuple[BadRecord, ...] = ()
    """In order; after one more than `most_bad` of them nothing more was read."""
    numbers: tuple[int, ...] | None = None
    """Of the records whose values these are, counted as those of bad ones; None where that is 0, 1, 2 and so on."""


class Block(Protocol):
    """Some records of a source; small, and travels to another process."""

    @property
    def text_bytes(self) -> int:
        """About how much text it holds."""

    @property
    def file_bytes(self) -> int:
        """Its share of `Source.total_bytes`."""

    def read(self, reading: Reading) -> Parsed:
        """Its values under the keys."""


class Source(Protocol):
    """Where documents come from."""

    @property
    def name(self) -> str:
        """As the user gave it, or the file's path."""

    @property
    def total_bytes(self) -> int | None:
        """Size of the file; None if nobody knows."""

    @property
    def can_be_read_again(self) -> bool:
        """Whether `blocks` may be called twice, and gives the same."""

    def identity(self) -> dict[str, Any]:
        """What tells this source from a changed one; JSON-able."""

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """The source in order, cut into blocks of about SPAN_BYTES."""

    def place(self, number: int) -> str:
        """Where record `number`, counted from 0, is found: `file:line` for a file of lines."""


def too_large(size: int, reading: Reading) -> str:
    """The reason for which a document is not read."""
    return (
        f"{size:,} bytes are more than a document may have: allow them by --max-document-megabytes, "
        f"now {reading.most_bytes >> 20}"
    )
