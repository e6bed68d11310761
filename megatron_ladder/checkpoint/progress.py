"""Lines that tell how far a long reading of files is."""

import time
from collections.abc import Callable

INTERVAL_SECONDS = 5.0


class ProgressLines:
    """Tells bytes, rate and the time that is left every few seconds; nothing of what is over sooner."""

    def __init__(
        self, what: str, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._tell = tell
        self._clock = clock
        self._began = self._told = clock()

    def __call__(self, done: int, total: int) -> None:
        """To be called after every piece, with bytes done and bytes in all."""
        now = self._clock()
        if now - self._told < INTERVAL_SECONDS:
            return
        self._told = now
        rate = done / (now - self._began)
        left = round((total - done) / rate) if rate else 0
        self._tell(
            f"{self._what}: {done / 2**30:.1f} of {total / 2**30:.1f} GiB, {rate / 2**30:.2f} GiB/s, "
            f"{left // 60}:{left % 60:02d} left"
        )
