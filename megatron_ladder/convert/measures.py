"""What a conversion took: CPU time by part, and memory; and how far it is."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Report = Callable[[str], None]
"""Told of each line for the user."""

_REPORT_SECONDS = 2.0
_STATUS = Path("/proc/self/status")


class Measures:
    """CPU seconds of checksums apart, and the most anonymous memory that was seen."""

    def __init__(self) -> None:
        self.start_up_cpu = time.process_time()
        """CPU seconds from the process's start to here."""
        self.checksum_cpu = 0.0
        self.verify_cpu = 0.0
        self.peak_anonymous = 0
        """Bytes."""
        self._began = time.monotonic()

    @contextmanager
    def checksum(self) -> Iterator[None]:
        """Counts what runs inside as checksums."""
        began = time.thread_time()
        yield
        self.checksum_cpu += time.thread_time() - began

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Counts what runs inside as verification."""
        began = time.process_time()
        yield
        self.verify_cpu += time.process_time() - began

    def look_at_memory(self) -> None:
        """Notes how much anonymous memory is in use: what the process allocated, without files that it maps."""
        if _STATUS.exists():
            for line in _STATUS.read_text().splitlines():
                if line.startswith("RssAnon:"):
                    self.peak_anonymous = max(self.peak_anonymous, int(line.split()[1]) * 1024)

    def summary(self, written: int) -> str:
        """One line about everything so far.

        Args:
            written: bytes.
        """
        self.look_at_memory()
        seconds = time.monotonic() - self._began
        rest = time.process_time() - self.start_up_cpu - self.checksum_cpu - self.verify_cpu
        return (
            f"wrote {size_text(written)} in {seconds:.1f} s; CPU seconds: start-up {self.start_up_cpu:.2f}, "
            f"copying {rest:.2f}, checksums {self.checksum_cpu:.2f}, verification {self.verify_cpu:.2f}; "
            f"peak anonymous memory {size_text(self.peak_anonymous)}"
        )


class Progress:
    """A line every two seconds: bytes done, rate, and the time that is left."""

    def __init__(self, what: str, total: int, report: Report, measures: Measures) -> None:
        self._what, self._total, self._report, self._measures = what, total, report, measures
        self._began = self._told = time.monotonic()
        self._done = 0

    def add(self, count: int) -> None:
        """So many bytes more are done."""
        self._done += count
        now = time.monotonic()
        if now - self._told >= _REPORT_SECONDS:
            self._told = now
            self._measures.look_at_memory()
            rate = self._done / (now - self._began)
            left = (self._total - self._done) / rate
            self._report(
                f"{self._what}: {size_text(self._done)} of {size_text(self._total)}, "
                f"{size_text(int(rate))}/s, {left:.0f} s left"
            )


def size_text(count: int) -> str:
    """Bytes in units of powers of ten."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
