"""Memory shared by the ranks of one machine: for each rank, a ring of slots with the tensors of its latest collectives.

    per rank: launched | delivered | for each slot: time of the launch | time on the wire | bounds of parts | tensor

Collective k uses slot k mod SLOTS of every rank. Each word has one writer. Rank r writes its tensor and the times, and
for an all-to-all where the part of each rank begins, then `launched`; a reader that has seen `launched` therefore sees
the rest. A slot is reused only after every rank has published, in `delivered`, that it has read the tensor.

This relies on the processor's memory order. Every word is aligned and written by one move. x86 makes stores visible in
program order and never moves a load before an earlier load (TSO); large `memcpy`s that bypass the cache end with a
fence. Other processors guarantee neither, and Python offers no fence, so `SharedSlots` refuses to run on them rather
than occasionally reduce stale bytes.
"""

import contextlib
import mmap
import os
import platform
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.errors import UserError

SHARED_FOLDER = "/dev/shm"
ORDERED_MACHINES = ("x86_64", "AMD64", "i686")
SLOTS = 16
"""Collectives of a rank in flight at once."""
CACHE_LINE = 64
_WORD = 8
_LAUNCHED, _DELIVERED, _TIMES = (line * CACHE_LINE // _WORD for line in range(3))
_WIRE = _TIMES + SLOTS
_BEGINS = _WIRE + SLOTS


def _map_shared(group: CommGroup, num_bytes: int) -> mmap.mmap:
    """Return zeroed memory that all ranks of `group` share; a collective call.

    The group's rank 0 creates a file and all ranks map it. The file is removed before any rank returns, so the memory
    lives until the last mapping is closed, however the processes end. Its pages are allocated at the start, so that no
    measurement pays for them and a full file system is an error here (on every rank) instead of a bus error later.
    """
    with contextlib.ExitStack() as stack:
        path = None
        error = None
        memory = None
        try:
            if group.rank == 0:
                file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="megatron_ladder_", dir=SHARED_FOLDER))
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                path = file.name
        except OSError as cause:
            error = f"an emulated link needs {num_bytes} bytes in {SHARED_FOLDER} ({cause}): give it more (docker run "
            error += "--shm-size)"
        path, error = group.broadcast_object((path, error))
        try:
            if path is not None:
                with open(path, "r+b") as shared:
                    memory = mmap.mmap(shared.fileno(), num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as cause:
            error = f"rank {group.ranks[group.rank]} cannot open shared memory ({cause}): an emulated link needs all "
            error += "of its ranks on one machine"
        errors = group.broadcast_object([each for each in group.gather_objects(error) if each is not None])
    if memory is None or errors:
        raise UserError(*errors[:1])
    return memory


class SharedSlots:
    """The slots of all ranks. Collectives are numbered from 1, in launch order."""

    def __init__(self, group: CommGroup, num_bytes: int, number: int = 0) -> None:
        """Map slots for tensors of up to `num_bytes`, whose next collective is `number` + 1; a collective call.

        Raises UserError if the processor does not keep the order of stores.
        """
        if platform.machine() not in ORDERED_MACHINES:
            needed = f"a processor that keeps the order of stores ({', '.join(ORDERED_MACHINES)})"
            raise UserError(f"an emulated link needs {needed}; this one is {platform.machine()}")
        self.slot_bytes = -(-num_bytes // CACHE_LINE) * CACHE_LINE
        header = _WORD * (_BEGINS + SLOTS * group.size)
        row = header + SLOTS * self.slot_bytes
        memory = _map_shared(group, group.size * row)
        self._words = memoryview(memory).cast("q")
        self._rows = [rank * row // _WORD for rank in range(group.size)]
        self._rank = group.rank
        self._own = self._rows[group.rank]
        # A tensor made in inference mode is read-only outside of it.
        with torch.inference_mode(False):
            rows = torch.frombuffer(memory, dtype=torch.uint8).chunk(group.size)
            slots = [rank_row[header:].chunk(SLOTS) for rank_row in rows]
        self._slots = list(zip(*slots, strict=True))
        self.publish_delivered(number)

    def tensors(self, number: int, num_bytes: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the first bytes of a collective's slots as tensors, flat, in rank order."""
        return tuple(slot[:num_bytes].view(dtype) for slot in self._slots[number % SLOTS])

    def publish(self, number: int, launched_ns: int, wire_ns: int, begins: Sequence[int] = ()) -> None:
        """Publish that this rank has launched collective `number`, whose tensor is already in its slot.

        `wire_ns` is the time that its tensor needs on the wire, and `begins` are the elements of it where the part of
        each rank begins, if ranks get different parts.
        """
        slot = number % SLOTS
        self._words[self._own + _TIMES + slot] = launched_ns
        self._words[self._own + _WIRE + slot] = wire_ns
        for target, begin in enumerate(begins):
            self._words[self._own + self._begin_of(number, target)] = begin
        self._words[self._own + _LAUNCHED] = number

    def launched(self) -> list[int]:
        """Return the last collective that each rank has launched."""
        return [self._words[row + _LAUNCHED] for row in self._rows]

    def last_launch_ns(self, number: int) -> int:
        """Return the time of the latest rank's launch of a collective that all have launched."""
        return max(self._words[row + _TIMES + number % SLOTS] for row in self._rows)

    def wire_ns(self, number: int) -> int:
        """Return the longest time on the wire among the ranks' tensors of a collective that all have launched."""
        return max(self._words[row + _WIRE + number % SLOTS] for row in self._rows)

    def begins(self, number: int) -> list[int]:
        """Return where this rank's part begins in each rank's tensor of a collective that all have launched."""
        return [self._words[row + self._begin_of(number, self._rank)] for row in self._rows]

    def publish_delivered(self, number: int) -> None:
        """Publish that this rank has read the collectives up to `number`."""
        self._words[self._own + _DELIVERED] = number

    def delivered(self) -> list[int]:
        """Return the last collective that each rank has read."""
        return [self._words[row + _DELIVERED] for row in self._rows]

    def _begin_of(self, number: int, target: int) -> int:
        return _BEGINS + number % SLOTS * len(self._rows) + target
