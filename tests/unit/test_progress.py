"""Progress of long operations, on a terminal and in a log."""

import io
import threading

import pytest
import tqdm.std

from megatron_ladder import progress
from megatron_ladder.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_lines_with_amount_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    log = io.StringIO()
    with ProgressBar("copied", 4e6, stream=log) as bar:
        bar.advance(1e6, files=1)
        bar.print("a line")
        bar.advance(3e6, files=2)
    lines = log.getvalue().splitlines()
    assert "\r" not in log.getvalue() and "a line" in lines
    shown = [line for line in lines if line.startswith("copied:  25%")]
    assert shown and "1.00M/4.00M" in shown[0] and "B/s" in shown[0] and "files=1" in shown[0]
    assert lines[-1].startswith("copied: 100%")


def test_a_short_operation_is_silent_in_a_log() -> None:
    log = io.StringIO()
    with ProgressBar("copied", 10, stream=log) as bar:
        bar.advance(10)
    assert log.getvalue() == ""


def test_a_clock_that_is_set_back_stops_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    clock = iter(range(1000, 0, -1))
    monkeypatch.setattr(tqdm.std, "time", lambda: next(clock))
    log = io.StringIO()
    with ProgressBar("copied", 10, unit=" files", stream=log) as bar:
        bar.advance(5)
    assert "50%" in log.getvalue()


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    terminal = Terminal()
    with ProgressBar("copied", 10, unit=" files", stream=terminal) as bar:
        bar.advance(10)
    assert terminal.getvalue().count("\n") == 1 and "\rcopied: 100%" in terminal.getvalue()


def test_earlier_work_does_not_count_for_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    log = io.StringIO()
    with ProgressBar("copied", 10, unit=" files", done=9, stream=log):
        pass
    assert "90% 9/10" in log.getvalue() and "? files/s" in log.getvalue()


def test_no_thread_is_started() -> None:
    before = set(threading.enumerate())
    with ProgressBar("copied", 10, stream=Terminal()):
        assert set(threading.enumerate()) <= before
