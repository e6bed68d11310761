"""A line that says how far, how fast, and how long still."""

import time
from collections.abc import Callable

PROGRESS_SECONDS = 1.0
"""Progress lines come no closer than this."""

BAR_CHARACTERS = 20


class Progress:
    """Counts what was read, and shows it."""

    def __init__(self, total_bytes: int | None, log_interval: int, show: Callable[[str], None]) -> None:
        """
        Args:
            total_bytes: of all files as they lie there; None if it is not known.
            log_interval: documents between two lines.
            show: takes a line.
        """
        self._total = total_bytes
        self._log_interval = log_interval
        self._show = show
        self._begun = self._shown_at = time.monotonic()
        self._text_bytes = self._file_bytes = self._documents = self._shown_documents = self._file_bytes_before = 0

    def start_at(self, file_bytes: int) -> None:
        """What an earlier run did counts for how far, but not for how fast."""
        self._file_bytes_before = file_bytes

    def advance(self, text_bytes: int, file_bytes: int, documents: int) -> None:
        """Counts what was done, and shows it when a line is due."""
        self._text_bytes += text_bytes
        self._file_bytes += file_bytes
        self._documents += documents
        due = self._documents - self._shown_documents >= self._log_interval
        if due and time.monotonic() - self._shown_at >= PROGRESS_SECONDS:
            self.show()

    def show(self) -> None:
        """One line."""
        self._shown_at, self._shown_documents = time.monotonic(), self._documents
        seconds = max(self._shown_at - self._begun, 1e-3)
        self._show(
            f"tokenised {self._text_bytes / 1e6:,.1f} MB{self._how_far()}, {self._documents:,} documents"
            f" | {self._text_bytes / 1e6 / seconds:.1f} MB/s, {self._documents / seconds:,.0f} documents/s"
            f" | ETA {self._time_left(seconds)}"
        )

    def _how_far(self) -> str:
        if self._total is None:
            return ""
        done = self._file_bytes + self._file_bytes_before
        share = min(done / self._total, 1.0) if self._total else 1.0
        filled = round(share * BAR_CHARACTERS)
        return f" [{'#' * filled}{'.' * (BAR_CHARACTERS - filled)}] ({100 * share:.0f}%)"

    def _time_left(self, seconds: float) -> str:
        if self._total is None or (not self._file_bytes and self._total > self._file_bytes_before):
            return "unknown"
        left = max(self._total - self._file_bytes - self._file_bytes_before, 0)
        minutes, rest = divmod(round(left * seconds / max(self._file_bytes, 1)), 60)
        return f"{minutes}:{rest:02d}"
