"""The picture's numbers, its file, and that nothing pays for matplotlib before a picture is asked for."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ladder.lab.bench.paired import Ratio
from megatron_ladder.lab.bench.plot import Curve, Point, draw_speed_up, plot_speed_up

ROOT = Path(__file__).resolve().parents[4]

LADDER = Curve(
    "ladder",
    (
        Point(0.0, Ratio(1.0, 0.98, 1.01), 1.0),
        Point(1e-3, Ratio(1.7, 1.68, 1.75), 1.8),
        Point(2e-3, Ratio(1.4, 1.38, 1.42), 1.5),
    ),
)
PARALLEL = Curve("parallel", (Point(0.0, Ratio(1.0, 1.0, 1.0)), Point(2e-3, Ratio(1.5, 1.45, 1.55))))
BOUND = Curve("no-comm", (Point(0.0, Ratio(1.05, 1.0, 1.1)), Point(2e-3, Ratio(3.0, 3.0, 3.0))))


def test_the_picture_shows_what_was_measured() -> None:
    figure = draw_speed_up([LADDER, PARALLEL], BOUND, title="Decode", unit_seconds=2e-3, unit="c")
    (axes,) = figure.axes
    assert axes.get_title() == "Decode" and "(c)" in axes.get_xlabel()
    bars = {container.get_label(): container for container in axes.containers}
    line, _, (quartiles,) = bars["ladder"].lines
    assert line.get_xydata().tolist() == [[0.0, 1.0], [0.5, 1.7], [1.0, 1.4]]
    ends = [segment[:, 1] for segment in quartiles.get_segments()]
    assert np.allclose(ends, [[0.98, 1.01], [1.68, 1.75], [1.38, 1.42]])
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines["no-comm (bound)"] == [[0.0, 1.05], [1.0, 3.0]]
    dashed = [line.get_xydata().tolist() for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert [[0.0, 1.0], [0.5, 1.8], [1.0, 1.5]] in dashed
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(shown) == ["ladder", "no-comm (bound)", "parallel", "step-time model"]
    low, high = axes.get_ylim()
    assert low < 0.98 and 1.8 < high < 3.0


def test_a_picture_without_predictions_names_no_model() -> None:
    figure = draw_speed_up([PARALLEL], BOUND, title="Prefill")
    shown = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert sorted(shown) == ["no-comm (bound)", "parallel"]
    assert "(ms)" in figure.axes[0].get_xlabel()


def test_a_png_is_written(tmp_path: Path) -> None:
    path = tmp_path / "speed_up.png"
    plot_speed_up([LADDER], BOUND, path, title="Decode")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("module", ["bench.paired", "bench.plot", "cost.links"])
def test_importing_is_light(module: str) -> None:
    heavy = "{'matplotlib', 'torch', 'deepspeed', 'numpy'}"
    script = f"import sys, megatron_ladder.{module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
