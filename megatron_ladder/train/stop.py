"""How a run is asked to end: signals, a time limit, a number of steps, a file.

A wish is one rank's; the end is everybody's. What each rank has noted travels with the norm of the gradient, in the
collective that every step has anyway, so all ranks learn of it in the same step and end after it together.

Importing this file imports no torch: signals are taken over before anything that takes long.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from megatron_ladder.config.training import ReliabilityConfig

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SECONDS = 2.0
"""Signals within it are one: a launcher hands on what the terminal has sent already, and may send two itself."""
LOOK_SECONDS = 1.0
"""How often the kill switch is looked for."""


class StopSignals:
    """Inside `with StopSignals() as signals`, SIGTERM and SIGINT are noted, and the second one ends the process.

    A thread reads what the C handler writes to a pipe, so the second signal ends a process too whose main thread
    waits in a collective and cannot run a handler of Python. A signal that the parent has set to be ignored stays so.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        """Numbers of signals, the first one at most once."""
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._old_pipe)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._pipe[1])
        self._thread.join()
        os.close(self._pipe[0])

    def _listen(self) -> None:
        noted = 0.0
        while number := os.read(self._pipe[0], 1):
            if number[0] not in SIGNALS:
                continue
            if not self.received:
                noted = time.monotonic()
                self.received.append(number[0])
            elif time.monotonic() - noted > SAME_SECONDS:
                sys.stderr.write(f"a second {signal.Signals(number[0]).name}: ends at once\n")
                sys.stderr.flush()
                os._exit(128 + number[0])


class Stopper:
    """Whether a run is to end after the step that it is in."""

    def __init__(self, config: ReliabilityConfig, signals: StopSignals | None, rank: int, start: float) -> None:
        """`start`: `time.monotonic()` when the process began."""
        self._config = config
        self._signals = signals
        self._rank = rank
        self._start = start
        self._looked = -LOOK_SECONDS
        self._killed = False

    def votes(self) -> list[float]:
        """What this rank has noted: 1 or 0 for each reason, to be summed over ranks."""
        received = self._signals.received if self._signals is not None else []
        minutes = self._config.exit_duration_in_mins
        late = minutes is not None and time.monotonic() - self._start > 60 * minutes
        noted = [*(number in received for number in SIGNALS), late, self._sees_kill_switch()]
        return [float(wish) for wish in noted]

    def reason(self, sums: Sequence[float], iteration: int = 0) -> str | None:
        """Why all ranks end after this step, if they do.

        Args:
            sums: `votes` of all ranks, added up.
            iteration: the step; 0 before the first one.
        """
        texts = [
            *(signal.Signals(number).name for number in SIGNALS),
            f"--exit-duration-in-mins {self._config.exit_duration_in_mins}",
            f"--kill-switch-file {self._config.kill_switch_file}",
        ]
        for text, ranks in zip(texts, sums, strict=True):
            if ranks > 0:
                return text
        interval = self._config.exit_interval
        if interval is not None and iteration > 0 and iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None

    def _sees_kill_switch(self) -> bool:
        path = self._config.kill_switch_file
        if path is None or self._rank != 0 or time.monotonic() - self._looked < LOOK_SECONDS:
            return self._killed
        self._looked = time.monotonic()
        with contextlib.suppress(OSError):
            self._killed = path.exists()
        return self._killed
