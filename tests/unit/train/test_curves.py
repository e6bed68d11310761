"""TensorBoard files that can be written, and that cannot."""

from pathlib import Path
from typing import NoReturn

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_ladder.train.log import _Curves

# TensorBoard's thread dies of the error, and may report that during a later test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def steps(folder: Path) -> list[int]:
    """Return the steps that TensorBoard shows in the curve `loss`."""
    shown = EventAccumulator(str(folder))
    shown.Reload()
    return [point.step for point in shown.Scalars("loss")]


def fail(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_only_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = _Curves(tmp_path, 0, "configuration")
    curves.scalars(1, {"loss": 2.0})
    monkeypatch.setattr(RecordWriter, "write", fail)
    for iteration in (2, 3):
        curves.scalars(iteration, {"loss": 2.0})
    curves.close(3)
    assert capsys.readouterr().out == (
        f"*** --tensorboard-dir {tmp_path}: cannot be written ([Errno 28] No space left on device): no more curves "
        "from iteration 2 on ***\n"
    )
    assert steps(tmp_path) == [1]


def test_a_failing_close_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = _Curves(tmp_path, 0, "configuration")
    curves.scalars(1, {"loss": 2.0})
    monkeypatch.setattr(RecordWriter, "close", fail)
    curves.close(1)
    assert "from iteration 1 on" in capsys.readouterr().out and steps(tmp_path) == [1]


def test_a_folder_that_cannot_be_created_ends_only_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    curves = _Curves(tmp_path / "file" / "folder", 6, "configuration")
    curves.scalars(7, {"loss": 2.0})
    curves.close(7)
    assert capsys.readouterr().out.count("no more curves from iteration 6 on") == 1


@pytest.mark.parametrize(("hide_later", "kept"), [(True, [1, 3]), (False, [1, 2, 3])])
def test_points_of_repeated_steps_are_hidden(tmp_path: Path, hide_later: bool, kept: list[int]) -> None:
    before = _Curves(tmp_path, 0, "configuration")
    for iteration in (1, 2):
        before.scalars(iteration, {"loss": 2.0})
    before.close(2)
    after = _Curves(tmp_path, 1, "configuration", hide_later)
    after.scalars(3, {"loss": 2.0})
    after.close(3)
    assert steps(tmp_path) == kept
