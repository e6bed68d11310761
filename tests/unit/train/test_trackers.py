"""Trackers with the real clients, offline, and a service that fails or hangs."""

import json
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from wandb.proto.wandb_internal_pb2 import Record

from megatron_ladder.config.run import RunConfig
from megatron_ladder.errors import UserError
from megatron_ladder.train import trackers
from megatron_ladder.train.record import RunRecord
from megatron_ladder.train.trackers import Tracker, TrackerThread, check_trackers, close_trackers, open_trackers
from tests.helpers.training import run_of

# TensorBoard's thread dies of the error, and may report that during a later test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def run_with(*flags: object) -> RunConfig:
    return run_of(["--train-iters", "4", "--lr", "1e-3", *map(str, flags)], 1)


def log(run: RunConfig, losses: Mapping[int, float], before: int = 0, hide_later: bool = True) -> list[str]:
    """Log losses in a process that starts after some iterations; return the messages."""
    said: list[str] = []
    record = RunRecord(run.checkpoint.save)
    record.write("start", iteration=before)
    threads = open_trackers(run, before, hide_later, record, said.append)
    for iteration, loss in losses.items():
        for thread in threads:
            thread.log_metrics(iteration, {"train/lm loss": loss})
    for thread in threads:
        thread.log_samples(max(losses), [("Once\nupon", " a time")])
    close_trackers(threads, max(losses), failed=False)
    return said


def steps(folder: Path) -> list[int]:
    """Return the steps that TensorBoard shows."""
    shown = EventAccumulator(str(folder))
    shown.Reload()
    return [point.step for point in shown.Scalars("train/lm loss")]


def fail(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_only_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = run_with("--tensorboard-dir", tmp_path), list[str]()
    (thread,) = open_trackers(run, 0, True, RunRecord(None), said.append)
    thread.log_metrics(1, {"train/lm loss": 2.0})
    written = threading.Event()
    thread.call(1, written.set)
    assert written.wait(10)
    monkeypatch.setattr(RecordWriter, "write", fail)
    for iteration in (2, 3):
        thread.log_metrics(iteration, {"train/lm loss": 2.0})
    close_trackers([thread], 3, failed=False)
    assert said == [
        f"*** --tensorboard-dir {tmp_path}: cannot be written ([Errno 28] No space left on device): no more curves "
        "from iteration 2 on ***"
    ]
    assert steps(tmp_path) == [1]


def test_a_failing_close_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordWriter, "close", fail)
    (said,) = log(run_with("--tensorboard-dir", tmp_path), {1: 2.0})
    assert "from iteration 1 on" in said and steps(tmp_path) == [1]


def test_a_folder_that_cannot_be_created_ends_only_the_curves(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (said,) = log(run_with("--tensorboard-dir", tmp_path / "file" / "folder"), {7: 2.0}, before=6)
    assert "no more curves from iteration 6 on" in said


@pytest.mark.parametrize(("hide_later", "kept"), [(True, [1, 3]), (False, [1, 2, 3])])
def test_points_of_repeated_steps_are_hidden(tmp_path: Path, hide_later: bool, kept: list[int]) -> None:
    run = run_with("--tensorboard-dir", tmp_path)
    log(run, {1: 2.0, 2: 2.0})
    log(run, {3: 2.0}, 1, hide_later)
    assert steps(tmp_path) == kept


def wandb_records(path: Path) -> Iterator[Record]:
    """Read wandb's file: LevelDB's log format (blocks of 32 KiB, fragments), with a protocol buffer per record."""
    content, position, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


@pytest.mark.long
def test_wandb_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = run_with("--save", tmp_path, "--wandb-project", "ladders", "--wandb-exp-name", "first")
    check_trackers(run)
    assert log(run, {1: 2.5, 2: 2.25}) == log(run, {2: 2.25, 3: 2.0}, before=1) == []
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert first.name == second.name, "both have the id of the run"
    records = list(wandb_records(first))
    (started,) = [record.run for record in records if record.HasField("run")]
    assert (started.project, started.display_name) == ("ladders", "first")
    config = {item.key: item.value_json for item in started.config.update}
    assert json.loads(config["training"])["seq_length"] == 12
    history = [
        {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
        for one in (first, second)
        for record in wandb_records(one)
        if record.HasField("history")
    ]
    losses = [(row["iteration"], row["train/lm loss"]) for row in history if "train/lm loss" in row]
    assert losses == [("1", "2.5"), ("2", "2.25"), ("2", "2.25"), ("3", "2")]
    assert sum("samples" in name for row in history for name in row) >= 2


def test_mlflow_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    run = run_with("--save", tmp_path, "--mlflow-experiment", "ladders")
    check_trackers(run)
    assert log(run, {1: 2.5, 2: 2.25}) == log(run, {3: 2.0}, before=2) == []
    client = MlflowClient()
    experiment = client.get_experiment_by_name("ladders")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["training.seq_length"] == "12"
    points = client.get_metric_history(found.info.run_id, "train/lm loss")
    assert [(point.step, point.value) for point in points] == [(1, 2.5), (2, 2.25), (3, 2.0)]
    assert [file.path for file in client.list_artifacts(found.info.run_id, "samples")] == [
        "samples/iteration_2.txt",
        "samples/iteration_3.txt",
    ]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:secret@host/mlflow")
    assert trackers._Mlflow(run).name == "--mlflow-experiment ladders at https://host/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    log(run, {1: 3.0})
    assert len(client.search_runs([experiment.experiment_id])) == 2, "a training from scratch has a new run"


def test_a_missing_package_and_a_missing_address_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with("--wandb-project", "p", "--mlflow-experiment", "e")
    with mock.patch.dict(sys.modules, {"wandb": None, "mlflow.tracking": None}), pytest.raises(UserError) as missing:
        check_trackers(run)
    assert [message.split(": ")[0] for message in missing.value.messages] == [
        "--wandb-project p",
        "--mlflow-experiment e",
    ]
    assert "pip install 'megatron-ladder[wandb]'" in missing.value.messages[0]
    assert "pip install 'megatron-ladder[mlflow]'" in missing.value.messages[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError) as unusable:
        check_trackers(run)
    key, address = unusable.value.messages
    assert key.startswith("--wandb-project p: No API key configured") and "WANDB_MODE=offline" in key
    assert address.startswith("--mlflow-experiment e: ") and "MLFLOW_TRACKING_URI" in address


class HangingTracker(Tracker):
    """A service that answers nothing until it is released."""

    name = "--wandb-project slow"

    def __init__(self) -> None:
        self.released = threading.Event()

    def open(self, previous: str | None) -> None:
        """Do nothing."""

    def log_metrics(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.released.wait(20)

    def close(self, failed: bool) -> None:
        """Do nothing."""


def test_a_service_that_hangs_delays_neither_steps_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 0.2)
    slow, said = HangingTracker(), list[str]()
    thread = TrackerThread(slow, said.append)
    for iteration in range(1, 4):
        thread.log_metrics(iteration, {"loss": 1.0})
    close_trackers([thread], 3, failed=False)
    assert said == ["*** --wandb-project slow: did not finish within 0.2 s: no more curves from iteration 3 on ***"]
    slow.released.set()
