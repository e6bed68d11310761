"""What has happened to a run, in `run.jsonl` beside its checkpoints: one line of JSON for each event, only appended.

    {"time": "2026-01-31T12:00:00.123+00:00", "event": "save", "iteration": 100, ...}

Each line is one `write` to a file opened for appending, so lines of several processes on one machine do not mix.
A process that dies may leave its last line torn; the next one begins a new line, and readers pass over the torn one.

Importing this file imports no torch.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RECORD_NAME = "run.jsonl"
EVALUATES = "evaluates"
"""The reason of a `start` that takes no step, whatever steps are done: those after it are not lost."""


class RunRecord:
    """Appends events of a rank to the record of a directory; does nothing without one."""

    def __init__(self, folder: Path | None, rank: int = 0) -> None:
        self.rank = rank
        self._path = None if folder is None else folder / RECORD_NAME

    def write_first(self, event: str, /, **fields: Any) -> None:
        """Appends an event that all ranks know of, on the first rank."""
        if self.rank == 0:
            self.write(event, **fields)

    def write(self, event: str, /, **fields: Any) -> None:
        """Appends an event; a full disk loses the line and not the run.

        Args:
            fields: JSON-able; numbers that are not finite become text.
        """
        if self._path is None:
            return
        told = {name: _plain(value) for name, value in fields.items()}
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **told})
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, f"{os.linesep if torn else ''}{line}\n".encode())
            finally:
                os.close(descriptor)


def read_record(folder: Path) -> list[dict[str, Any]]:
    """The events of a directory's record, in their order; lines that are torn are left out.

    Raises:
        OSError: there is no record, or it cannot be read.
    """
    events = []
    for line in (folder / RECORD_NAME).read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, Mapping) and isinstance(event.get("event"), str):
                events.append({**event, "time": datetime.fromisoformat(event["time"])})
    return events


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)) else value
