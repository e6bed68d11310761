"""Curves in TensorBoard's files and in Weights & Biases, and disks that fail."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_ladder.config.run import RunConfig
from megatron_ladder.train.curves import Curves, check_wandb
from tests.helpers.runs import errors_of
from tests.helpers.training import run_of


def run_with(*flags: object) -> RunConfig:
    return run_of(["--train-iters", "4", "--lr", "1e-3", *map(str, flags)], 1)


def log(run: RunConfig, losses: Mapping[int, float], before: int = 0, hide_later: bool = True) -> None:
    """Log losses in a process that starts after some iterations."""
    curves = Curves(run, before, hide_later)
    for iteration, loss in losses.items():
        curves.metrics(iteration, {"train/lm loss": loss})
    curves.samples(max(losses), [("Once\nupon", " a time")])
    curves.close(max(losses), failed=False)


def steps(folder: Path) -> list[int]:
    """Return the steps that TensorBoard shows."""
    shown = EventAccumulator(str(folder))
    shown.Reload()
    return [point.step for point in shown.Scalars("train/lm loss")]


def fail(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("method", "kept"), [("write", False), ("close", True)])
def test_a_full_disk_ends_only_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str, kept: bool
) -> None:
    log(run_with("--tensorboard-dir", tmp_path), {1: 2.0})
    monkeypatch.setattr(RecordWriter, method, fail)
    log(run_with("--tensorboard-dir", tmp_path), {2: 2.0, 3: 2.0}, before=1)
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"*** --tensorboard-dir {tmp_path}: cannot be written (No space left on device)")
    assert "no more curves from iteration" in said
    assert steps(tmp_path) == ([1, 2, 3] if kept else [1])


@pytest.mark.parametrize(("hide_later", "kept"), [(True, [1, 3]), (False, [1, 2, 3])])
def test_points_of_repeated_steps_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hide_later: bool, kept: list[int]
) -> None:
    # Files of one second are read in the order of the texts of their numbers: 10 before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    run = run_with("--tensorboard-dir", tmp_path)
    log(run, {1: 2.0, 2: 2.0})
    log(run, {3: 2.0}, 1, hide_later)
    assert steps(tmp_path) == kept


def test_a_missing_package_and_a_missing_key_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with("--wandb-project", "p", "--tensorboard-dir", tmp_path)
    with mock.patch.dict(sys.modules, {"wandb": None}):
        (error,) = errors_of(check_wandb, run.logging)
    assert error.startswith("--wandb-project p: ") and error.endswith("pip install wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (error,) = errors_of(check_wandb, run.logging)
    assert error.startswith("--wandb-project p: no usable API key ") and "WANDB_MODE=offline" in error


def test_wandb_follows_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = ["--wandb-project", "ladders", "--wandb-exp-name", "first", "--tensorboard-dir", tmp_path / "curves"]
    run = run_with("--save", tmp_path, *flags)
    log(run, {1: 2.5})
    assert capsys.readouterr().out == "" and steps(tmp_path / "curves") == [1]
    given = {"project": "ladders", "name": "first", "dir": tmp_path, "config": run.to_dict(), "sync_tensorboard": True}
    assert wandb.mock_calls == [mock.call.init(**given), mock.call.init().finish(exit_code=0), mock.call.teardown()]
