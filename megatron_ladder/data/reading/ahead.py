"""Several sources read side by side, each by a thread of its own, and handed on in their order.

Decompressing releases Python's lock, so that threads gain there what many workers need.
"""

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from megatron_ladder.data.reading.protocol import Block, Reading, Source

BLOCKS_AHEAD = 4
"""Of each source, that wait in memory."""

WAIT_SECONDS = 0.1
"""Between two looks at whether anybody still wants blocks."""


def blocks_side_by_side(sources: Sequence[Source], reading: Reading, count: int) -> Iterator[tuple[int, Block]]:
    """All blocks in order, each with the number of its source; `count` sources are read at once."""
    if count == 1:
        for number, source in enumerate(sources):
            yield from ((number, block) for block in source.blocks(reading))
        return
    waiting = deque(enumerate(sources))
    reading_now: deque[tuple[int, _Reader]] = deque()
    try:
        while waiting or reading_now:
            while waiting and len(reading_now) < count:
                number, source = waiting.popleft()
                reading_now.append((number, _Reader(source, reading)))
            number, reader = reading_now[0]
            yield from ((number, block) for block in reader)
            reading_now.popleft()
    finally:
        for _, reader in reading_now:
            reader.stop()


class _Reader:
    """A thread that reads one source a little ahead."""

    def __init__(self, source: Source, reading: Reading) -> None:
        self._queue: queue.Queue[Block | BaseException | None] = queue.Queue(BLOCKS_AHEAD)
        self._stopped = threading.Event()
        self._source, self._reading = source, reading
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for block in self._source.blocks(self._reading):
                if not self._put(block):
                    return
            self._put(None)
        except BaseException as error:  # Raised again where the blocks are wanted.
            self._put(error)

    def _put(self, item: Block | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=WAIT_SECONDS)
                return True
            except queue.Full:
                pass
        return False

    def __iter__(self) -> Iterator[Block]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        """Lets the thread end, for which nobody waits."""
        self._stopped.set()
