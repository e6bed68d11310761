"""CPU time and memory of a conversion."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Report = Callable[[str], None]
"""Receives lines for the user."""

_STATUS = Path("/proc/self/status")


class Measures:
    """CPU seconds by part, and the peak of anonymous memory."""

    def __init__(self) -> None:
        self.start_up_cpu = time.process_time()
        """CPU seconds since the process started."""
        self.checksum_cpu = 0.0
        self.verify_cpu = 0.0
        self.peak_anonymous = 0
        """Bytes."""
        self._began = time.monotonic()

    @contextmanager
    def checksum(self) -> Iterator[None]:
        """Count the block as checksums."""
        began = time.thread_time()
        yield
        self.checksum_cpu += time.thread_time() - began

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Count the block as verification."""
        began = time.process_time()
        yield
        self.verify_cpu += time.process_time() - began

    def sample_memory(self) -> None:
        """Update the peak of anonymous memory: allocations of the process, without mapped files."""
        if _STATUS.exists():
            for line in _STATUS.read_text().splitlines():
                if line.startswith("RssAnon:"):
                    self.peak_anonymous = max(self.peak_anonymous, int(line.split()[1]) * 1024)

    def summary(self, written: int) -> str:
        """Return one line about the whole conversion; `written` is in bytes."""
        self.sample_memory()
        seconds = time.monotonic() - self._began
        rest = time.process_time() - self.start_up_cpu - self.checksum_cpu - self.verify_cpu
        return (
            f"wrote {size_text(written)} in {seconds:.1f} s; CPU seconds: start-up {self.start_up_cpu:.2f}, "
            f"copying {rest:.2f}, checksums {self.checksum_cpu:.2f}, verification {self.verify_cpu:.2f}; "
            f"peak anonymous memory {size_text(self.peak_anonymous)}"
        )


def size_text(count: int) -> str:
    """Return a number of bytes in decimal units."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
