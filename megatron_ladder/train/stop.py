"""Graceful shutdown: on signals, after a time limit or a number of steps, or when a file appears.

Each rank votes to stop, and all ranks stop together: the votes are summed in the collective of the gradient norm, which
every step has anyway, so all ranks learn of a vote in the same step.

Importing this file does not import torch, so that signals are handled before anything that takes long.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from megatron_ladder.config.sections import ReliabilityConfig

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_SECONDS = 2.0
"""Signals within this time count as one: a launcher forwards signals that the terminal sent too, and may send two."""
_LOOK_SECONDS = 1.0
"""Time between two checks of the kill switch."""


class StopSignals:
    """Context manager that notes SIGTERM and SIGINT; the second signal ends the process.

    A thread reads what the C handler writes to a pipe. So the second signal ends even a process whose main thread is
    blocked in a collective, where it cannot run a Python handler. A signal that the parent ignores stays ignored.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        """The number of the first signal, if any."""
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self._pipe = (-1, -1)
        self._old_pipe = -1
        self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)

    def __enter__(self) -> Self:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._old_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_pipe)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._pipe[1])
        self._thread.join()
        os.close(self._pipe[0])

    def _listen(self) -> None:
        noted = 0.0
        while number := os.read(self._pipe[0], 1):
            if number[0] not in _SIGNALS:
                continue
            if not self.received:
                noted = time.monotonic()
                self.received.append(number[0])
            elif time.monotonic() - noted > _SAME_SECONDS:
                sys.stderr.write(f"a second {signal.Signals(number[0]).name}: ends at once\n")
                sys.stderr.flush()
                os._exit(128 + number[0])


@dataclass
class Stopper:
    """Decides whether a run ends after the current step."""

    config: ReliabilityConfig
    signals: StopSignals | None
    rank: int
    start: float
    """`time.monotonic()` at the start of the process."""
    _looked: float = field(default=-_LOOK_SECONDS, init=False)
    _killed: bool = field(default=False, init=False)

    def votes(self) -> list[float]:
        """Return this rank's vote for each reason, 1 or 0, to be summed over ranks."""
        received = self.signals.received if self.signals is not None else []
        now = time.monotonic()
        path = self.config.kill_switch_file
        if path is not None and self.rank == 0 and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            with contextlib.suppress(OSError):
                self._killed = path.exists()
        minutes = self.config.exit_duration_in_mins
        late = minutes is not None and now - self.start > 60 * minutes
        return [float(vote) for vote in (*(number in received for number in _SIGNALS), late, self._killed)]

    def reason(self, sums: Sequence[float], iteration: int = 0) -> str | None:
        """Return why all ranks end after a step (0: before the first), or None; `sums` are all ranks' votes."""
        texts = [
            *(signal.Signals(number).name for number in _SIGNALS),
            f"--exit-duration-in-mins {self.config.exit_duration_in_mins}",
            f"--kill-switch-file {self.config.kill_switch_file}",
        ]
        for text, votes in zip(texts, sums, strict=True):
            if votes > 0:
                return text
        interval = self.config.exit_interval
        if interval is not None and iteration > 0 and iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None
