"""What long operations print: their progress on stderr (amount, rate and remaining time), and lines that may be lost.

On a terminal a bar is redrawn in place. Elsewhere a line is printed every few seconds, so that logs stay readable.
"""

import contextlib
import sys
import threading
import time
from typing import Any, Self, TextIO

from tqdm import tqdm

PLAIN_SECONDS = 10.0
"""Time between two lines on a stream that is not a terminal."""


class _Bar(tqdm):  # type: ignore[misc]
    # No monitor thread and no lock shared between processes: callers fork workers.
    monitor_interval = 0
    # tqdm reads the wall clock: after it was set back, no line would appear until it has caught up.
    _time = property(lambda bar: time.monotonic, lambda bar, clock: None)
    _lock = threading.RLock()


class _PlainBar(_Bar):
    disable: bool

    @staticmethod
    def status_printer(file: TextIO) -> Any:
        return lambda text: print(text, file=file, flush=True)

    def close(self) -> None:
        if not self.disable:
            self.disable = True
            self._decr_instances(self)
            if self._time() - self.start_t >= self.delay:
                self.display()


class ProgressBar:
    """Shows how much of a long operation is done; use as a context manager.

    `total` is the amount of work in `unit`, or None if it is unknown. An earlier run did `done` of it, which does not
    count for the rate. `unit` is "B" for bytes, which are shown in powers of 1000, or a word such as "trial", as in
    "2.00s/trial". The `stream` is stderr if it is not given.
    """

    def __init__(
        self, description: str, total: float | None, unit: str = "B", done: float = 0, stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        options: dict[str, Any] = {"desc": description, "total": total, "initial": done, "unit": unit}
        options |= {"unit_scale": unit == "B", "file": self._stream, "miniters": 1}
        if self._is_terminal:
            self._bar = _Bar(**options, mininterval=0.2, dynamic_ncols=True)
        else:
            # Without columns there is no room for the drawn bar.
            self._bar = _PlainBar(**options, mininterval=PLAIN_SECONDS, delay=PLAIN_SECONDS, ncols=0)

    def advance(self, amount: float, **notes: object) -> None:
        """Count finished work, and update the display if it is due. `notes` are shown after the rate."""
        if notes:
            self._bar.set_postfix(notes, refresh=False)
        self._bar.update(amount)

    def print(self, text: str) -> None:
        """Print a line of text above the bar, on the same stream."""
        if self._is_terminal:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Show the final state. A short operation prints nothing on a stream that is not a terminal."""
        self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def print_if_possible(text: str) -> None:
    """Print and flush. If the terminal is gone or the disk full, the text is lost but the run continues."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def print_rank_0(text: str, rank: int) -> None:
    """Print on rank 0, as `print_if_possible` does."""
    if rank == 0:
        print_if_possible(text)
