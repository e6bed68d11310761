"""Time limits of tests. They end what hangs, and a machine that shares its cores must not look as if it hung."""

import time
from collections.abc import Callable

_factor = 1.0


def be_patient(factor: float) -> None:
    """Multiply the limits of this test run."""
    global _factor
    _factor = factor


def patient(seconds: float) -> float:
    """Return the limit, in seconds, for what takes less than `seconds` on a machine of its own."""
    return _factor * seconds


def wait_until(is_done: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition holds, at most for the patient limit; the caller checks it."""
    deadline = time.monotonic() + patient(seconds)
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.001)
