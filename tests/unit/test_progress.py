"""Progress of long operations, on a terminal and in a log."""

import io

import pytest

from megatron_ladder import progress
from megatron_ladder.progress import ProgressBar


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


def test_earlier_work_does_not_count_for_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    log = io.StringIO()
    with ProgressBar("copied", 10, unit="file", done=9, stream=log):
        pass
    assert "90% 9/10" in log.getvalue() and "?file/s" in log.getvalue()
