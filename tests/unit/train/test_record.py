"""A record that survives the death of its writer."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from megatron_ladder.errors import LostPeerError
from megatron_ladder.train.record import RECORD_NAME, RunRecord, attempt_outcome, read_record, recording_refusal
from tests.helpers.patience import patient


def test_events_are_read_in_order(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.write("start", iteration=3, directory=tmp_path)
    record.write("skip", loss=math.nan)
    first, second = read_record(tmp_path)
    assert first["event"] == "start" and first["iteration"] == 3 and first["directory"] == str(tmp_path)
    assert second["loss"] == "nan" and abs((datetime.now(UTC) - second["time"]).total_seconds()) < patient(60)
    for line in (tmp_path / RECORD_NAME).read_text().splitlines():
        json.loads(line)


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: record.write("load", iteration=number, filler="x" * 300), range(200)))
    assert sorted(event["iteration"] for event in read_record(tmp_path)) == list(range(200))


def test_only_rank_0_writes_what_all_ranks_know(tmp_path: Path) -> None:
    RunRecord(tmp_path, rank=1).write_first("start")
    assert not (tmp_path / RECORD_NAME).exists()
    RunRecord(tmp_path, rank=1).write("hang", ranks=[0])
    assert read_record(tmp_path)[0]["ranks"] == [0]


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([], 1),
        (["launch", "start", 0], 0),
        (["launch", "start", 4, 3], 3),
        (["launch", 2], 2),
        (["launch", 4, 2], 2),
        (["launch", "start"], 1),
        (["launch", "start", 0, 4], 1),
        (["launch", "start", 0, ("refused", 2)], 2),
        (["launch", "start", 0, ("refused", 4)], 1),
        ([("refused", 2), "launch", "start", 4], 1),
        # A finished run was continued, and killed while it loaded.
        (["launch", "start", 0, "launch", "load"], 1),
    ],
)
def test_the_outcome_is_that_of_the_last_attempt(events: list[str | int | tuple[str, int]], outcome: int) -> None:
    """A word is an event, a number the code of a `stop`."""
    pairs = [one if isinstance(one, tuple) else (one, 0) if isinstance(one, str) else ("stop", one) for one in events]
    assert attempt_outcome([{"event": event, "code": code} for event, code in pairs]) == outcome


@pytest.mark.parametrize(("has_launched", "events"), [(False, ["refused"]), (True, ["launch"])])
def test_a_failure_before_the_launch_replaces_an_earlier_outcome(
    has_launched: bool, events: list[str], tmp_path: Path
) -> None:
    """Otherwise a finished run that is continued and cannot connect would count as finished."""
    record = RunRecord(tmp_path)
    for event in ("launch", "stop"):
        record.write(event, code=0)
    with pytest.raises(LostPeerError), recording_refusal(tmp_path):
        if has_launched:
            record.write("launch")
        raise LostPeerError("rank 1 did not arrive")
    found = read_record(tmp_path)
    assert [event["event"] for event in found[2:]] == events and attempt_outcome(found) == 1


def test_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.write("start", iteration=1)
    with open(tmp_path / RECORD_NAME, "ab") as file:
        for text in b'"save end"}', b'"start", "iteration": [1]}', b'"progress", "iteration": 1}', b'"prog\xc3':
            file.write(b'\n{"time": "2026-01-31T12:00:00+00:00", "event": ' + text)
    assert [event["event"] for event in read_record(tmp_path)] == ["start"]
    record.write("stop", code=0)
    assert [event["event"] for event in read_record(tmp_path)] == ["start", "stop"]
