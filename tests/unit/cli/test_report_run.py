"""The report of a hand-written record with known numbers."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from megatron_ladder.cli.report_run import _describe, _summarize, main
from megatron_ladder.errors import UserError
from megatron_ladder.train.record import RunRecord

BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC)


def event(seconds: float, kind: str, /, **fields: Any) -> dict[str, Any]:
    return {"time": BEGAN + timedelta(seconds=seconds), "event": kind, **fields}


def progress(seconds: float, iteration: int, steps: int, spent: float) -> dict[str, Any]:
    return event(seconds, "progress", iteration=iteration, steps=steps, seconds=spent, loss=2.0, tokens_per_second=9.0)


# 10 steps of 1 s; steps 5 to 8 are lost, since the second start begins after step 4; 50 s in all.
EVENTS = [
    event(0, "start", iteration=0),
    progress(3, 3, 3, 3.0),
    event(3.5, "save begin", iteration=4),
    event(4, "save end", iteration=4, blocked_seconds=0.5),
    progress(6, 6, 3, 3.0),
    progress(8, 8, 2, 2.0),
    event(9, "hang", ranks=[3]),
    event(15, "launch"),
    event(30, "start", iteration=4),
    progress(33, 7, 3, 3.0),
    event(34, "skip", iteration=8),
    progress(36, 10, 3, 3.0),
    event(50, "stop", reason="SIGTERM", code=0),
]


def test_goodput_counts_steps_that_were_kept() -> None:
    summary = _summarize(EVENTS)
    assert (summary.wall_seconds, summary.steps, summary.lost_steps, summary.interruptions) == (50.0, 10, 4, 1)
    assert summary.kept_seconds == pytest.approx(10.0) and summary.goodput == pytest.approx(0.2)
    report = _describe(EVENTS, summary)
    assert "goodput: 20.0%: 10.0 s in 10 steps that were kept" in report
    assert "interruptions: 1; starts: 2\n" in report
    assert "saves: 1, which blocked training for 0.5 s" in report
    assert "skipped steps: 1; loss spikes kept: 0\nhangs: 1; killed or crashed: 0\n" in report
    assert "start 1, 2026-01-31 12:00:00: 0 -> 8: interrupted: ranks [3]: did not answer in time" in report
    assert "4 -> 10: SIGTERM (exit code 0)" in report


def test_steps_that_only_a_save_records_count() -> None:
    """Saves after steps 20 and 40, 1 s each, before the first progress would have been logged."""
    saves = [
        event(20, "save begin", iteration=20),
        event(21, "save end", iteration=20, blocked_seconds=1.0),
        event(41, "save begin", iteration=40),
    ]
    killed = [event(0, "start", iteration=0), *saves]
    assert ": 0 -> 40: no end is recorded" in _describe(killed, _summarize(killed))
    summary = _summarize([*killed, event(50, "launch"), event(60, "start", iteration=20), progress(100, 60, 40, 40.0)])
    assert (summary.steps, summary.lost_steps, summary.kept_seconds) == (60, 20, 60.0)
    # A later progress includes them.
    logged = _summarize([*killed, progress(101, 100, 100, 99.0), event(102, "stop", reason="done", code=0)])
    assert (logged.steps, logged.lost_steps, logged.kept_seconds) == (100, 0, 99.0)


@pytest.mark.parametrize(
    ("ends", "counts", "outcome"),
    [
        (
            [],
            "hangs: 0; killed or crashed: 1",
            "no end is recorded: killed (for example for lack of memory) or crashed",
        ),
        ([("lost", {})], "hangs: 0; killed or crashed: 1", "interrupted: rank 3 on a: killed (for example"),
        ([("hang", {}), ("lost", {})], "hangs: 1; killed or crashed: 0", "interrupted: rank 3 on a: did not answer"),
        ([("stop", {"reason": "OSError", "code": 1}), ("lost", {})], "hangs: 0; killed or crashed: 0", "OSError (exit"),
    ],
)
def test_a_killed_rank_is_no_hang(ends: list[tuple[str, dict[str, Any]]], counts: str, outcome: str) -> None:
    found = [event(9, kind, **{"ranks": [3], "where": "rank 3 on a", **more}) for kind, more in ends]
    events = [event(0, "start", iteration=0), progress(3, 3, 3, 3.0), *found, event(15, "launch")]
    report = _describe(events, _summarize([*events, event(30, "start", iteration=3)]))
    assert "interruptions: 1; starts: 2\n" in report and counts in report
    assert f": 0 -> 3: {outcome}" in report
    assert "3 -> 3: no end is recorded: running, or killed" in report
    # No later start.
    assert f"interruptions: {int(bool(ends))}; starts: 1\n" in _describe(events, _summarize(events))


def test_later_starts_that_did_not_train_change_nothing() -> None:
    """A start that failed early, and an evaluation of an older checkpoint."""
    later = [
        *EVENTS,
        event(55, "stop", reason="UserError", code=2),
        event(60, "start", iteration=4, reason="evaluates"),
        event(61, "evaluation", iteration=4, loss=2.0),
        event(62, "stop", reason="evaluated", code=0),
    ]
    summary = _summarize(later)
    assert (summary.steps, summary.lost_steps, summary.interruptions) == (10, 4, 1)
    assert "4 -> 10: SIGTERM (exit code 0)" in _describe(later, summary)


def test_the_program_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = RunRecord(tmp_path)
    for one in EVENTS:
        record.write(one["event"], **{name: value for name, value in one.items() if name not in ("time", "event")})
    main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert "lost steps: 4" in printed and f"plot: {tmp_path / 'report.png'}" in printed
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_errors_name_their_flag(tmp_path: Path) -> None:
    for words, flag in ((["--output", "report.txt"], "--output"), ([], "--run")):
        with pytest.raises(UserError, match=f"^{flag} "):
            main([str(tmp_path), *words])
    RunRecord(tmp_path).write("launch")
    with pytest.raises(UserError, match="records no start"):
        main(["--run", str(tmp_path)])
