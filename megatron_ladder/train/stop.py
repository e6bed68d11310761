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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_ladder.config.sections import ReliabilityConfig
from megatron_ladder.errors import Problem

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_SECONDS = 2.0
"""Signals within this time count as one: a launcher forwards signals that the terminal sent too, and may send two."""
_LOOK_SECONDS = 1.0
"""Time between two checks of the kill switch."""


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect the first SIGTERM or SIGINT in a list inside the block; the second signal ends the process.

    A thread reads what the C handler writes to a pipe. So the second signal ends even a process whose main thread is
    blocked in a collective, where it cannot run a Python handler. A signal that the parent ignores stays ignored.
    """
    received: list[int] = []
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    pipe_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    listener = threading.Thread(target=_listen, args=(reader, received), name="stop signals", daemon=True)
    listener.start()
    try:
        yield received
    finally:
        signal.set_wakeup_fd(pipe_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        listener.join()
        os.close(reader)


def _listen(reader: int, received: list[int]) -> None:
    noted = 0.0
    while number := os.read(reader, 1):
        if number[0] not in _SIGNALS:
            continue
        if not received:
            noted = time.monotonic()
            received.append(number[0])
        elif time.monotonic() - noted > _SAME_SECONDS:
            sys.stderr.write(f"a second {signal.Signals(number[0]).name}: ends at once\n")
            sys.stderr.flush()
            os._exit(128 + number[0])


@dataclass
class Stopper:
    """Decides whether a run ends after the current step."""

    config: ReliabilityConfig
    received: Sequence[int]
    """The signals so far."""
    rank: int
    start: float
    """`time.monotonic()` at the start of the process."""
    _looked: float = field(default=-_LOOK_SECONDS, init=False)
    _killed: bool = field(default=False, init=False)

    def votes(self) -> list[float]:
        """Return this rank's vote for each reason, 1 or 0, to be summed over ranks."""
        now = time.monotonic()
        path = self.config.kill_switch_file
        if path is not None and self.rank == 0 and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            with contextlib.suppress(OSError):
                self._killed = path.exists()
        minutes = self.config.exit_duration_in_mins
        late = minutes is not None and now - self.start > 60 * minutes
        return [float(vote) for vote in (*(number in self.received for number in _SIGNALS), late, self._killed)]

    def reason(self, sums: Sequence[float], iteration: int = 0) -> str | None:
        """Return why all ranks end after a step (0: before the first), or None; `sums` are all ranks' votes."""
        reasons = [signal.Signals(number).name for number in _SIGNALS]
        reasons += map(self._limit, ("exit_duration_in_mins", "kill_switch_file"))
        for reason, votes in zip(reasons, sums, strict=True):
            if votes > 0:
                return reason
        interval = self.config.exit_interval
        if interval is not None and iteration > 0 and iteration % interval == 0:
            return self._limit("exit_interval")
        return None

    def _limit(self, name: str) -> str:
        return str(Problem({name: getattr(self.config, name)}, "{}"))
