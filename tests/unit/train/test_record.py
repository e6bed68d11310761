"""A record that survives the death of who writes it."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from megatron_ladder.train.record import RECORD_NAME, RunRecord, read_record


def test_events_come_back_in_order(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.write("start", iteration=3, directory=tmp_path)
    record.write("skip", loss=math.nan)
    first, second = read_record(tmp_path)
    assert first["event"] == "start" and first["iteration"] == 3 and first["directory"] == str(tmp_path)
    assert second["loss"] == "nan" and abs((datetime.now(UTC) - second["time"]).total_seconds()) < 60
    for line in (tmp_path / RECORD_NAME).read_text().splitlines():
        json.loads(line)


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.write("start", iteration=1)
    with open(tmp_path / RECORD_NAME, "ab") as file:
        file.write(b'{"time": "2026-01-31T12:00:00+00:00", "event": "prog\xc3')
    assert [event["event"] for event in read_record(tmp_path)] == ["start"]
    record.write("stop", code=0)
    assert [event["event"] for event in read_record(tmp_path)] == ["start", "stop"]


def test_writers_do_not_mix(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: record.write("progress", iteration=number, filler="x" * 300), range(200)))
    assert sorted(event["iteration"] for event in read_record(tmp_path)) == list(range(200))


def test_only_the_first_rank_tells_what_all_know(tmp_path: Path) -> None:
    RunRecord(tmp_path, rank=1).write_first("start")
    assert not (tmp_path / RECORD_NAME).exists()
    RunRecord(tmp_path, rank=1).write("hang", ranks=[0])
    assert read_record(tmp_path)[0]["ranks"] == [0]


def test_without_a_directory_and_without_room_a_run_goes_on(tmp_path: Path) -> None:
    RunRecord(None).write("start")
    RunRecord(tmp_path / "none").write("start")
    assert list(tmp_path.iterdir()) == []
