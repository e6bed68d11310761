"""The clocks in which an emulated wire takes time.

`WallClock` is what a user sees, and needs a core for each rank. `ProcessorClock` leaves out what other processes do on
the same cores. Each rank has one, which advances with the processor time of its thread, and jumps where a rank waits:

    rank 0   [ computes ][ launch ][ computes     ][ wait: jumps to the end ]
    rank 1   [ computes     ][ launch ][ computes ][ wait: jumps to the end ]
    wire                     ~~~~~~~~ alpha + bytes * beta ~~~~~~~~~~~~~~~~~^ end

Polling for a peer that is late on other clocks takes no time on this one: what counts is the time of the peer's launch.
"""

import time
from typing import Protocol


class LinkClock(Protocol):
    """The time of one rank, in nanoseconds."""

    def restart(self) -> None:
        """Begin a measurement; all ranks do so at the same point."""

    def now_ns(self) -> int:
        """Return the time, which is comparable between ranks since `restart`."""

    def wait_until(self, end_ns: int) -> None:
        """Return at this time, or at once if it has passed."""

    def finish_polling(self, began_ns: int) -> None:
        """Count, or leave out, the time since `began_ns`, in which the rank has polled for its peers."""


class WallClock:
    """The monotonic clock of the machine."""

    def __init__(self, spin_seconds: float) -> None:
        """`spin_seconds`: how long before its end a wait stops sleeping and polls the clock."""
        self._spin_ns = round(spin_seconds * 1e9)

    def restart(self) -> None:
        """See `LinkClock`."""

    def now_ns(self) -> int:
        """See `LinkClock`."""
        return time.monotonic_ns()

    def wait_until(self, end_ns: int) -> None:
        """See `LinkClock`."""
        left = end_ns - time.monotonic_ns()
        if left > self._spin_ns:
            time.sleep((left - self._spin_ns) * 1e-9)
        while time.monotonic_ns() < end_ns:
            pass

    def finish_polling(self, began_ns: int) -> None:
        """See `LinkClock`; waiting for a peer takes time."""


class ProcessorClock:
    """The processor time of the calling thread since `restart`, and the ends of the collectives it has waited for."""

    def __init__(self) -> None:
        self._zero_ns = time.thread_time_ns()

    def restart(self) -> None:
        """See `LinkClock`."""
        self._zero_ns = time.thread_time_ns()

    def now_ns(self) -> int:
        """See `LinkClock`."""
        return time.thread_time_ns() - self._zero_ns

    def wait_until(self, end_ns: int) -> None:
        """See `LinkClock`."""
        self._zero_ns -= max(0, end_ns - self.now_ns())

    def finish_polling(self, began_ns: int) -> None:
        """See `LinkClock`; only the launch of a peer takes time."""
        self._zero_ns += self.now_ns() - began_ns
