"""The loss plot: from event files of torch's SummaryWriter to the lines of a figure and the bytes of a PNG file."""

import math
import struct
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_ladder.cli import plot_loss
from megatron_ladder.cli.plot_loss import _draw, _read_run, _RunCurves, _ScalarCurve, _smooth, main
from megatron_ladder.errors import UserError


def write_events(directory: Path, tag: str, values: dict[int, float], wall_time: float = 1.0) -> None:
    with SummaryWriter(str(directory), filename_suffix=f".{tag.replace('/', '-')}-{wall_time}") as writer:
        for step, value in values.items():
            writer.add_scalar(tag, value, step, walltime=wall_time + step)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "ladder"
    write_events(directory, "train/lm loss", {1: 8.0, 2: 6.0, 3: 5.0})
    write_events(directory, "valid/lm loss", {2: 6.5})
    write_events(directory, "valid/web lm loss", {2: 7.5})
    write_events(directory, "valid/web ppl", {2: 1808.0})
    write_events(directory, "speed/tokens per second", {1: 900.0, 2: 1000.0, 3: 1100.0})
    return directory


def test_reads_all_curves(run_directory: Path) -> None:
    run = _read_run(run_directory, "mine")
    assert run == _RunCurves(
        "mine",
        _ScalarCurve((1, 2, 3), (8.0, 6.0, 5.0)),
        {"": _ScalarCurve((2,), (6.5,)), "web": _ScalarCurve((2,), (7.5,))},
        _ScalarCurve((1, 2, 3), (900.0, 1000.0, 1100.0)),
    )


def test_a_run_without_points_since_its_restart_is_reported(tmp_path: Path) -> None:
    write_events(tmp_path, "train/lm loss", {1: 8.0, 2: 6.0}, wall_time=1.0)
    with SummaryWriter(str(tmp_path), purge_step=1, filename_suffix=".restarted"):
        pass
    with pytest.raises(UserError, match="there are no scalars"):
        _read_run(tmp_path, "")


def test_the_last_value_of_an_iteration_counts(tmp_path: Path) -> None:
    write_events(tmp_path, "train/lm loss", {1: 8.0, 2: 6.0, 3: 99.0}, wall_time=1.0)
    write_events(tmp_path, "train/lm loss", {3: 5.0, 4: 4.0}, wall_time=1000.0)
    assert _read_run(tmp_path, "").train_loss == _ScalarCurve((1, 2, 3, 4), (8.0, 6.0, 5.0, 4.0))


def test_smoothing_by_hand() -> None:
    expected = [
        (4 + 8 / 2 + 2 / 4) / (1 + 1 / 2 + 1 / 4),
        (4 / 2 + 8 + 2 / 2) / (1 / 2 + 1 + 1 / 2),
        (4 / 4 + 8 / 2 + 2) / (1 / 4 + 1 / 2 + 1),
    ]
    assert _smooth([4.0, 8.0, 2.0], 0.5) == pytest.approx(expected)
    assert _smooth([4.0, 8.0], 0.0) == [4.0, 8.0]
    assert _smooth([3.0, 4.0, 5.0, 6.0, 7.0], 0.8)[2] == pytest.approx(5.0), "no lag on a slope"


def test_smoothing_skips_non_finite_values() -> None:
    smoothed = _smooth([4.0, math.nan, 8.0, math.inf], 0.5)
    assert math.isnan(smoothed[1])
    assert smoothed[2] == pytest.approx((4 / 4 + 8) / (1 / 4 + 1))
    assert smoothed[3] == math.inf


def test_figure_holds_raw_bold_and_validation_lines() -> None:
    train = _ScalarCurve((1, 2), (4.0, 8.0))
    runs = [
        _RunCurves("a", train, {"web": _ScalarCurve((2,), (7.0,))}, _ScalarCurve((1, 2), (10.0, 20.0))),
        _RunCurves("b", _ScalarCurve((1, 2), (3.0, 3.0)), {}, None),
    ]
    figure = _draw(runs, "Two runs", 0.5)
    loss, throughput = figure.axes
    drawn = [list(map(float, line.get_ydata())) for line in loss.lines]
    assert drawn == [[4, 8], pytest.approx([16 / 3, 20 / 3]), [7], [3, 3], [3, 3]]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == [
        "a: training",
        "a: validation web",
        "b: training",
    ]
    assert (loss.get_title(), loss.get_ylabel()) == ("Two runs", "loss (nats per token)")
    assert (throughput.get_xlabel(), throughput.get_ylabel()) == ("iteration", "tokens/s")
    assert len(throughput.lines) == 1


def test_one_panel_without_throughput() -> None:
    (loss,) = _draw([_RunCurves("a", _ScalarCurve((1,), (4.0,)), {}, None)], "t", 0.0).axes
    assert loss.get_xlabel() == "iteration"
    assert len(loss.lines) == 1, "without smoothing the curve is drawn once"


def test_writes_a_png(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "loss.png"
    main(["--tensorboard-dir", str(run_directory), "--output", str(output)])
    content = output.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (9 * 120, 7 * 120)
    assert "ladder: training loss 5.0000 at iteration 3" in capsys.readouterr().out


def test_all_errors_are_reported(run_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        main(["--tensorboard-dir", str(run_directory), "--labels", "a", "b", "--smoothing", "1", "--output", "x.jpg"])
    assert [message.split()[0].rstrip(":") for message in caught.value.messages] == [
        "--smoothing",
        "--labels",
        "--output",
    ]
    write_events(tmp_path / "other", "train/grad norm", {1: 1.0})
    (tmp_path / "empty").mkdir()
    directories = [str(tmp_path / name) for name in ("missing", "empty", "other")]
    with pytest.raises(UserError) as caught:
        main(["--tensorboard-dir", *directories])
    missing, empty, other = caught.value.messages
    assert "missing: no such directory" in missing
    assert "no 'train/lm loss'" in empty and "there are no scalars" in empty
    assert "train/grad norm" in other


def test_missing_matplotlib_is_one_error(run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install matplotlib"):
        main(["--tensorboard-dir", str(run_directory), "--output", str(tmp_path / "loss.png")])


def test_entry_point_exits_with_the_user_error_code(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", lambda code: ended.append(code) or exit(code))
    monkeypatch.setattr("sys.argv", ["plot_loss.py"])
    with pytest.raises(SystemExit):
        plot_loss.entry_point()
    assert ended == [2]
