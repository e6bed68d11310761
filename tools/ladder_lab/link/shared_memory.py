"""Memory shared by the ranks of one machine: a board of counters and records, and an arena for their tensors.

    board    per rank: launched | delivered | a ring of RECORDS records (launch, bytes, wire time)
    arena    per rank: a ring of bytes that only this rank writes

Each word has one writer. Rank r writes its tensor into its part of the arena, then the record, then `launched`;
a reader that has seen `launched` therefore sees the rest. Bytes and records are reused only after every rank
has published, in `delivered`, that it has read them.

This relies on the processor's memory order. Every word is aligned and written by one move. x86 makes stores visible in
program order and never moves a load before an earlier load (TSO); large `memcpy`s that bypass the cache end with a
fence. Other processors guarantee neither, and Python offers no fence, so `Board` refuses to run on them rather than
occasionally reduce stale bytes.
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
"""Collectives in flight at once, limited by records."""
IN_FLIGHT = 8
"""Collectives of one size in flight at once, limited by bytes: the capacity of an arena."""

CACHE_LINE = 64
_WORD = 8
_LAUNCHED, _DELIVERED, _FIRST_RECORD = (line * CACHE_LINE // _WORD for line in range(3))
_RECORD_WORDS = 4
_ROW_WORDS = _FIRST_RECORD + RECORDS * _RECORD_WORDS


def _map_shared(group: CommGroup, num_bytes: int) -> mmap.mmap:
    """Return zeroed memory that all ranks of `group` share; a collective call.

    The group's rank 0 creates a file and all ranks map it. The file is removed before any rank returns, so the memory
    lives until the last mapping is closed, however the processes end. Its pages are allocated at the start, so that no
    measurement pays for them and a full file system is an error here (on every rank) instead of a bus error later.
    """
    created: tuple[str | None, str | None] = _create(num_bytes) if group.rank == 0 else (None, None)
    memory = None
    try:
        path, error = group.broadcast_object(created)
        if path is not None:
            try:
                memory = _open(path, num_bytes)
            except OSError as cause:
                error = f"rank {group.ranks[group.rank]} cannot open shared memory ({cause}): an emulated link needs "
                error += "all of its ranks on one machine"
        errors = [each for each in group.gather_objects(error) if each is not None]
    finally:
        # Also when a peer is lost in between.
        if created[0] is not None:
            os.unlink(created[0])
    errors = group.broadcast_object(errors)
    if memory is None or errors:
        raise UserError(*errors[:1])
    return memory


def _create(num_bytes: int) -> tuple[str | None, str | None]:
    """Create a file of allocated zeros; returns its path, or an error to report on all ranks."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="megatron_ladder_", dir=SHARED_FOLDER)
    except OSError as error:
        return None, f"an emulated link needs {SHARED_FOLDER}: {error}"
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.unlink(path)
        return None, f"{SHARED_FOLDER} has no {num_bytes} bytes left ({error}): give it more (docker run --shm-size)"
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path, None


def _open(path: str, num_bytes: int) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class Record(NamedTuple):
    """A collective that a rank has launched, by the monotonic clock, which all processes of a machine share."""

    launched_ns: int
    num_bytes: int
    wire_ns: int


class Board:
    """Counters and records of all ranks. Collectives are numbered from 1, in launch order."""

    def __init__(self, group: CommGroup) -> None:
        """Map the board; a collective call. Raises UserError if the processor does not keep the order of stores."""
        if platform.machine() not in ORDERED_MACHINES:
            needed = f"a processor that keeps the order of stores ({', '.join(ORDERED_MACHINES)})"
            raise UserError(f"an emulated link needs {needed}; this one is {platform.machine()}")
        self._memory = _map_shared(group, group.size * _ROW_WORDS * _WORD)
        self._words = memoryview(self._memory).cast("q")
        self._rows = [rank * _ROW_WORDS for rank in range(group.size)]
        self._row = self._rows[group.rank]

    def publish(self, number: int, record: Record) -> None:
        """Publish that this rank has launched collective `number`, whose bytes are already in the arena."""
        first = self._record(self._row, number)
        for word, value in enumerate(record):
            self._words[first + word] = value
        self._words[self._row + _LAUNCHED] = number

    def launched(self) -> list[int]:
        """Return the last collective that each rank has launched."""
        return [self._words[row + _LAUNCHED] for row in self._rows]

    def records(self, number: int) -> list[Record]:
        """Return each rank's record of a collective that all have launched and not all have delivered."""
        firsts = [self._record(row, number) for row in self._rows]
        return [Record(*self._words[first : first + 3]) for first in firsts]

    def publish_delivered(self, number: int) -> None:
        """Publish that this rank has read the collectives up to `number`."""
        self._words[self._row + _DELIVERED] = number

    def delivered(self) -> list[int]:
        """Return the last collective that each rank has read."""
        return [self._words[row + _DELIVERED] for row in self._rows]

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._memory.close()

    @staticmethod
    def _record(row: int, number: int) -> int:
        return row + _FIRST_RECORD + number % RECORDS * _RECORD_WORDS


class Arena:
    """One ring of bytes per rank. A collective has the same place in every rank's ring.

    The place depends only on the sizes of the collectives so far, so the ranks agree without communicating.
    """

    def __init__(self, group: CommGroup, num_bytes: int) -> None:
        """Map rings that hold `IN_FLIGHT` tensors of `num_bytes`; a collective call."""
        # One more than IN_FLIGHT: the unused end of a ring is smaller than one tensor.
        self.capacity = _whole_lines(num_bytes) * (IN_FLIGHT + 1)
        self._memory = _map_shared(group, group.size * self.capacity)
        self._rings = [rank * self.capacity for rank in range(group.size)]
        self._next = 0
        self._claims: deque[tuple[int, int]] = deque()
        self._views: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}

    def holds(self, num_bytes: int) -> bool:
        """Return whether `IN_FLIGHT` tensors of this size fit."""
        return _whole_lines(num_bytes) * (IN_FLIGHT + 1) <= self.capacity

    def claim(self, number: int, num_bytes: int) -> tuple[int, int]:
        """Reserve bytes for collective `number`, and return their offset and a collective (0: none).

        Every rank must have delivered that one before these bytes, and the record of `number`, can be written.
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
        """Return the bytes at `offset` of each rank's ring, in rank order, as flat tensors."""
        key = (offset, num_bytes, dtype)
        if key not in self._views:
            # Bounds the cache when sizes never repeat.
            if len(self._views) >= 4 * RECORDS:
                self._views.clear()
            count = num_bytes // dtype.itemsize
            # A tensor made in inference mode is read-only outside of it, and torch makes none of zero elements.
            with torch.inference_mode(False):
                self._views[key] = tuple(
                    torch.frombuffer(self._memory, dtype=dtype, count=max(1, count), offset=ring + offset)[:count]
                    for ring in self._rings
                )
        return self._views[key]

    def close(self) -> None:
        """Release the memory when its last view is released."""
        self._views.clear()
        del self._memory


def _whole_lines(num_bytes: int) -> int:
    """Round up to cache lines, at least one, so that every collective has a distinct place."""
    return max(1, -(-num_bytes // CACHE_LINE)) * CACHE_LINE
