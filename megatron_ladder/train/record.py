"""What a run writes next to its checkpoints: its record, and the lock that keeps other runs away.

    SAVE/run.jsonl      one JSON line per event; lines are only appended
                        {"time": "2026-01-31T12:00:00.123+00:00", "event": "save", "iteration": 100, ...}
    SAVE/run.lock       {"host", "pid", "started"} of the run that writes here; empty if none does

Each line of the record is one `write` to a file opened for appending, so lines of several processes on one machine do
not mix. A process that dies may leave an incomplete last line; the next writer starts a new line, and readers skip it.

Each attempt to run begins with `launch`, before it loads anything, and ends with a `stop` of every rank that knows how
it ended. If other ranks end it, one rank records `hang` (they did not answer in time) or `lost` (they closed their
connections). A rank that is lost without a `stop` was killed or crashed. An attempt that fails before it owns the
directory is `refused`.

Importing this file does not import torch.
"""

import contextlib
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_ladder.errors import ExitCode, Problem, UserError, exit_code_of
from megatron_ladder.files import lock_file

RECORD_NAME = "run.jsonl"
_LOCK_NAME = "run.lock"
_MOST_LOCK_BYTES = 4096
EVALUATES = "evaluates"
"""The `reason` of a `start` that takes no step. Later steps in the record remain valid after such a start."""

_NUMBERS = {
    "start": ("iteration",),
    "progress": ("iteration", "steps", "seconds", "loss", "tokens_per_second"),
    "evaluation": ("loss",),
    "save begin": ("iteration",),
    "save end": ("blocked_seconds",),
    "stop": ("code",),
    "refused": ("code",),
}
"""Fields without which an event is incomplete."""


class RunRecord:
    """Appends events of a rank to the record of a directory; without a directory it does nothing."""

    def __init__(self, folder: Path | None, rank: int = 0) -> None:
        self.rank = rank
        self._path = None if folder is None else folder / RECORD_NAME

    def write_first(self, event: str, /, **fields: Any) -> None:
        """Append an event that all ranks know, on rank 0 only."""
        if self.rank == 0:
            self.write(event, **fields)

    def write(self, event: str, /, **fields: Any) -> None:
        """Append an event, which is lost if the disk is full. Numbers that are not finite become strings."""
        if self._path is None:
            return
        values = {name: _plain(value) for name, value in fields.items()}
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **values})
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                size = os.fstat(descriptor).st_size
                incomplete = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, f"{os.linesep if incomplete else ''}{line}\n".encode())
            finally:
                os.close(descriptor)


def read_record(folder: Path) -> list[dict[str, Any]]:
    """Return a directory's events in order, without incomplete ones; raises OSError if the record cannot be read."""
    events = []
    for line in (folder / RECORD_NAME).read_bytes().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            event = json.loads(line)
            if isinstance(event, Mapping) and isinstance(event.get("event"), str):
                for name in _NUMBERS.get(event["event"], ()):
                    float(event[name])
                events.append({**event, "time": datetime.fromisoformat(event["time"]).astimezone(UTC)})
    return events


@contextlib.contextmanager
def recording_refusal(save: Path | None) -> Iterator[None]:
    """Record invalid input, and failures before the run owns the directory of --save, for `report_run.py --status`."""
    folder = save if os.environ.get("RANK", "0") == "0" else None
    launches = _count_launches(folder)
    try:
        yield
    except Exception as error:
        if folder is not None and (isinstance(error, UserError) or _count_launches(folder) == launches):
            # ValueError: the name is impossible.
            with contextlib.suppress(OSError, ValueError):
                folder.mkdir(exist_ok=True)
                RunRecord(folder).write("refused", code=int(exit_code_of(error)))
        raise


def _count_launches(folder: Path | None) -> int:
    with contextlib.suppress(OSError, ValueError):
        return 0 if folder is None else sum(event["event"] == "launch" for event in read_record(folder))
    return 0


def attempt_outcome(events: Sequence[Mapping[str, Any]]) -> ExitCode:
    """Return how the last attempt of a record ended, whatever exit code its launcher had.

    DONE if it finished or was asked to stop, USER_ERROR or BAD_NUMBERS if repeating it would end it in the same way,
    otherwise INTERNAL: ranks were killed, lost each other or failed, or there was no attempt.
    """
    kinds = [event["event"] for event in events]
    if kinds[-1:] == ["refused"]:
        return ExitCode.USER_ERROR if events[-1]["code"] == ExitCode.USER_ERROR else ExitCode.INTERNAL
    last = len(kinds) - kinds[::-1].index("launch") if "launch" in kinds else len(kinds)
    codes = {event["code"] for event in events[last:] if event["event"] == "stop"}
    for code in (ExitCode.BAD_NUMBERS, ExitCode.USER_ERROR):
        if code in codes:
            return code
    return ExitCode.DONE if codes == {ExitCode.DONE} else ExitCode.INTERNAL


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)) else value


@contextlib.contextmanager
def save_lock(folder: Path, field_name: str = "save") -> Iterator[None]:
    """Hold the lock of a directory inside the block; one process of a run that writes there enters it.

    The kernel's lock on the file decides, also between machines if their file system shares locks. It ends with its
    holder. On a file system without locks there is only a warning. `field_name` is the folder's field, for messages.
    Raises UserError with the holder if another run has the lock.
    """
    import psutil

    path = folder / _LOCK_NAME
    fields = {field_name: folder}
    try:
        file = open(path, "a+b", buffering=0)  # noqa: SIM115
    except OSError as error:
        reason, fix = f"{{}}: {_LOCK_NAME}: {error.strerror}", "remove the file, or give another directory"
        raise UserError(Problem(fields, reason, fix)) from None
    with file:
        try:
            problem = lock_file(file.fileno())
        except BlockingIOError:
            holder = "it has not written its name yet"
            with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
                holder = "pid {pid} on {host}, started {started}".format_map(json.loads(path.read_bytes()))
            reason, fix = "{}: another run writes there: {holder}", "end it, or give another directory"
            raise UserError(Problem(fields, reason, fix, holder=holder)) from None
        if problem is not None:
            reason, fix = "{}: this file system has no locks ({error})", "make sure that no other run writes there"
            print(f"*** {Problem(fields, reason, fix, error=problem.strerror)} ***", flush=True)
        if os.fstat(file.fileno()).st_size > _MOST_LOCK_BYTES:
            reason, fix = f"{{}}: {_LOCK_NAME}: is not a run's lock", "remove it, or give another directory"
            raise UserError(Problem(fields, reason, fix))
        started = datetime.fromtimestamp(psutil.Process().create_time(), UTC).isoformat(timespec="seconds")
        me = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        # The content is only for messages, so a full disk does not matter.
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(json.dumps(me).encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)
