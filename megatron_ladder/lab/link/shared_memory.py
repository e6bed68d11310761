"""Memory that the ranks of one machine share: a board of counters and stamps, and an arena for their tensors.

    board    per rank: launched | delivered | a ring of RECORDS records (launch, bytes, wire time)
    arena    per rank: a ring of bytes that only this rank writes

Each word has one writer. Rank r writes its tensor into its part of the arena, then the record, then `launched`;
a reader that has seen `launched` therefore sees the rest. Bytes and records are used again only after every rank
has published, in `delivered`, that it has read them.

That order rests on the machine. Every word is aligned and written by one move, and x86 lets every processor see the
stores of another in program order and never moves a load before an earlier load (TSO); the copies that bypass the
cache in large `memcpy`s end with a fence of their own. Other processors order neither, and Python has no fence to
offer, so on them `Board` refuses to be made instead of reducing stale bytes now and then.
"""

import mmap
import os
import platform
import tempfile
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.errors import UserError

SHARED_FOLDER = "/dev/shm"
ORDERED_MACHINES = ("x86_64", "AMD64", "i686")

RECORDS = 256
"""Collectives that may be in flight at once, as far as records go."""
IN_FLIGHT = 8
"""Collectives of one size that may be in flight at once, as far as bytes go: what an arena must hold."""

CACHE_LINE = 64
_WORD = 8
_LAUNCHED, _DELIVERED, _FIRST_RECORD = (line * CACHE_LINE // _WORD for line in range(3))
_RECORD_WORDS = 4
_ROW_WORDS = _FIRST_RECORD + RECORDS * _RECORD_WORDS


def map_shared(group: CommGroup, num_bytes: int) -> mmap.mmap:
    """Zeroed memory that all ranks of `group` see; a collective call.

    The group's rank 0 makes a file, all map it, and its name is gone before any rank returns: the memory itself
    lives until the last mapping is closed, however the processes end. Its pages are there from the start, so that
    no measurement pays for them and a full file system is an error here and not a bus error later.

    Raises:
        UserError: on every rank: there is too little shared memory, or the ranks are not on one machine.
    """
    created: tuple[str | None, str | None] = _create(num_bytes) if group.rank == 0 else (None, None)
    path, mistake = group.broadcast_object(created)
    memory = None
    if path is not None:
        try:
            memory = _open(path, num_bytes)
        except OSError as error:
            mistake = f"rank {group.ranks[group.rank]} cannot open shared memory ({error}): an emulated link needs "
            mistake += "all of its ranks on one machine"
    mistakes = [each for each in group.gather_objects(mistake) if each is not None]
    if group.rank == 0 and path is not None:
        os.unlink(path)
    mistakes = group.broadcast_object(mistakes)
    if memory is None or mistakes:
        raise UserError(*mistakes[:1])
    return memory


def _create(num_bytes: int) -> tuple[str | None, str | None]:
    """A file of allocated zeros: its path, or what went wrong, which the other ranks must hear as well."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="megatron_ladder_", dir=SHARED_FOLDER)
    except OSError as error:
        return None, f"an emulated link needs {SHARED_FOLDER}: {error}"
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.unlink(path)
        return None, f"{SHARED_FOLDER} has no {num_bytes} bytes left ({error}): give it more (docker run --shm-size)"
    finally:
        os.close(descriptor)
    return path, None


def _open(path: str, num_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


class Record(NamedTuple):
    """What a rank tells the others about a collective that it launches."""

    launched_ns: int
    """When, on the monotonic clock, which all processes of a machine share."""
    num_bytes: int
    """Size of its tensor."""
    wire_ns: int
    """How long this rank takes the wire to be busy with it."""


class Board:
    """Counters and records of all ranks. Collectives are numbered from 1, in launch order."""

    def __init__(self, group: CommGroup) -> None:
        """A collective call.

        Raises:
            UserError: this processor may show other ranks a counter before what it counts.
        """
        if platform.machine() not in ORDERED_MACHINES:
            raise UserError(
                f"an emulated link needs a processor that keeps the order of stores ({', '.join(ORDERED_MACHINES)}); "
                f"this one is {platform.machine()}"
            )
        self._memory = map_shared(group, group.size * _ROW_WORDS * _WORD)
        self._words = memoryview(self._memory).cast("q")
        self._rows = [rank * _ROW_WORDS for rank in range(group.size)]
        self._row = self._rows[group.rank]

    def publish(self, number: int, record: Record) -> None:
        """Tells the others that this rank has launched collective `number`; its bytes are already in the arena."""
        first = self._record(self._row, number)
        for word, value in enumerate(record):
            self._words[first + word] = value
        self._words[self._row + _LAUNCHED] = number

    def launched(self) -> list[int]:
        """Of each rank, the last collective that it has launched."""
        return [self._words[row + _LAUNCHED] for row in self._rows]

    def records(self, number: int) -> list[Record]:
        """Of each rank, what it said about a collective that all have launched and not all have delivered."""
        firsts = [self._record(row, number) for row in self._rows]
        return [Record(self._words[first], self._words[first + 1], self._words[first + 2]) for first in firsts]

    def publish_delivered(self, number: int) -> None:
        """Tells the others that this rank reads nothing more of the collectives up to `number`."""
        self._words[self._row + _DELIVERED] = number

    def delivered(self) -> list[int]:
        """Of each rank, the last collective up to which it reads nothing more."""
        return [self._words[row + _DELIVERED] for row in self._rows]

    def close(self) -> None:
        """Gives the memory back."""
        self._words.release()
        self._memory.close()

    @staticmethod
    def _record(row: int, number: int) -> int:
        return row + _FIRST_RECORD + number % RECORDS * _RECORD_WORDS


class Arena:
    """One ring of bytes per rank. A collective has the same place in every rank's ring.

    A place depends on the sizes of the collectives so far and on nothing else, so the ranks agree without a word.
    """

    def __init__(self, group: CommGroup, num_bytes: int) -> None:
        """A collective call.

        Args:
            num_bytes: size of the largest tensor; the ring holds `IN_FLIGHT` of them.
        """
        # One more than IN_FLIGHT: what lies idle at the end of a ring is less than one tensor.
        self.capacity = _whole_lines(num_bytes) * (IN_FLIGHT + 1)
        self._memory = map_shared(group, group.size * self.capacity)
        self._rings = [rank * self.capacity for rank in range(group.size)]
        self._next = 0
        self._claims: deque[tuple[int, int]] = deque()
        self._views: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}

    def holds(self, num_bytes: int) -> bool:
        """Whether `IN_FLIGHT` tensors of this size find room."""
        return _whole_lines(num_bytes) * (IN_FLIGHT + 1) <= self.capacity

    def claim(self, number: int, num_bytes: int) -> tuple[int, int]:
        """Takes bytes for collective `number`.

        Returns:
            Their offset, and the last collective that every rank must have delivered before they, and the record of
            `number`, may be written (0: none).
        """
        size = _whole_lines(num_bytes)
        left = self.capacity - self._next % self.capacity
        start = self._next if size <= left else self._next + left
        self._next = start + size
        in_the_way = 0
        while self._claims and (
            self._claims[0][1] < self._next - self.capacity or self._claims[0][0] <= number - RECORDS
        ):
            in_the_way, _ = self._claims.popleft()
        self._claims.append((number, start))
        return start % self.capacity, in_the_way

    def views(self, offset: int, num_bytes: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The bytes at `offset` of each rank's ring, in rank order, as flat tensors."""
        key = (offset, num_bytes, dtype)
        if key not in self._views:
            # Sizes that never repeat must not fill the memory with views.
            if len(self._views) >= 4 * RECORDS:
                self._views.clear()
            count = num_bytes // dtype.itemsize
            self._views[key] = tuple(self._view(ring + offset, count, dtype) for ring in self._rings)
        return self._views[key]

    def close(self) -> None:
        """Gives the memory back, as soon as no view of it is in use."""
        self._views.clear()
        del self._memory

    def _view(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        # A tensor that is made in inference mode could not be written outside of it; torch makes none of no elements.
        with torch.inference_mode(False):
            return torch.frombuffer(self._memory, dtype=dtype, count=max(1, count), offset=offset)[:count]


def _whole_lines(num_bytes: int) -> int:
    """At least one cache line, so that every collective has a place of its own."""
    return max(1, -(-num_bytes // CACHE_LINE)) * CACHE_LINE
