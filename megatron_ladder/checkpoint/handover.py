"""How ranks tell rank 0 what they have written when no collective may run: through files in the save itself.

A save in the background ends at another time on every rank, while the training threads use the process groups, which
two threads must not share. All ranks write into one directory anyway, so a rank leaves its answer there.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from megatron_ladder.checkpoint.publish import write_whole
from megatron_ladder.comm.agreement import name_ranks

POLL_SECONDS = 0.05


class FileHandover:
    """Gathers one JSON-able value of every rank on rank 0, through files in a directory that all of them see."""

    def __init__(self, directory: Path, rank: int, size: int, timeout_seconds: float) -> None:
        """`timeout_seconds`: how long rank 0 waits for the others once its own part is done."""
        self._directory = directory
        self._rank = rank
        self._size = size
        self._timeout = timeout_seconds

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on rank 0; empty on the others, which do not wait.

        The files are removed before it returns.

        Raises:
            TimeoutError: a rank has left nothing; its number is told.
        """
        if self._rank != 0:
            # With no room left even for this, rank 0 finds out by waiting.
            with contextlib.suppress(OSError):
                write_whole(self._file(self._rank), json.dumps(value).encode())
            return []
        others = range(1, self._size)
        deadline = time.monotonic() + self._timeout
        while missing := [rank for rank in others if not self._file(rank).exists()]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name_ranks(missing)} did not finish writing in {self._timeout:g} s")
            time.sleep(POLL_SECONDS)
        values = [value, *(json.loads(self._file(rank).read_bytes()) for rank in others)]
        for rank in others:
            self._file(rank).unlink()
        return values

    def _file(self, rank: int) -> Path:
        return self._directory / f".written_by_rank_{rank:05d}.json"
