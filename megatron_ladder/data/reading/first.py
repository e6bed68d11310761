"""What a source begins with, read before its turn; the block is not lost where it can be read only once."""

from collections.abc import Iterator
from typing import Any

from megatron_ladder.data.reading.parquet import RowGroup
from megatron_ladder.data.reading.protocol import SPAN_BYTES, Block, Parsed, Reading, Source


class Begun:
    """A source that can be read only once, whose first block may be looked at before."""

    can_be_read_again = False

    def __init__(self, source: Source) -> None:
        self._source = source
        self._blocks: Iterator[Block] | None = None
        self._first: list[Block] = []

    @property
    def name(self) -> str:
        """That of the source."""
        return self._source.name

    @property
    def total_bytes(self) -> int | None:
        """That of the source."""
        return self._source.total_bytes

    def identity(self) -> dict[str, Any]:
        """That of the source."""
        return self._source.identity()

    def place(self, number: int) -> str:
        """That of the source."""
        return self._source.place(number)

    def first_block(self, reading: Reading) -> Block | None:
        """The first one, which `blocks` gives nevertheless; None if there is none. Raises as the source's `blocks`."""
        if self._blocks is None:
            self._blocks = self._source.blocks(reading)
            self._first = [block for block in [next(self._blocks, None)] if block is not None]
        return self._first[0] if self._first else None

    def blocks(self, reading: Reading) -> Iterator[Block]:
        """All of them."""
        self.first_block(reading)
        assert self._blocks is not None
        while self._first:
            yield self._first.pop()
        yield from self._blocks


def first_texts(source: Source, reading: Reading) -> list[str]:
    """Texts from the beginning of a source, about SPAN_BYTES of them; none where its first block holds none."""
    block = source.first_block(reading) if isinstance(source, Begun) else next(source.blocks(reading), None)
    if isinstance(block, RowGroup):
        block = block.beginning(SPAN_BYTES)
    parsed = Parsed((), 0) if block is None else block.read(reading)
    return [value for column in parsed.columns for value in column if isinstance(value, str)]
