"""The plot's numbers and its file, and that importing the benchmark's modules is cheap."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ladder.lab.bench.results import BenchmarkRow, plot_speed_up

ROOT = Path(__file__).resolve().parents[4]


def row(wiring: str, alpha_seconds: float, ratio: float, spread: float, predicted: float) -> BenchmarkRow:
    ours = (alpha_seconds, 1.0, ratio, spread, predicted, 0.0)
    return BenchmarkRow("decode", "small", wiring, "emulated serial wire", "1c", *ours, "sound")


ROWS = [
    row("standard", 0.0, 1.0, 0.0, 1.0),
    row("ladder", 0.0, 1.0, 0.03, 1.0),
    row("parallel", 0.0, 1.0, 0.0, 1.0),
    row("no-comm", 0.0, 1.05, 0.1, 1.0),
    row("ladder", 1e-3, 1.7, 0.08, 1.8),
    row("no-comm-parallel", 0.0, 9.0, 0.1, 9.0),
    row("ladder", 2e-3, 1.4, 0.04, 1.5),
    row("parallel", 2e-3, 1.5, 0.1, 1.6),
    row("no-comm", 2e-3, 3.0, 0.0, 3.0),
]


def test_the_plot_shows_the_measurement(tmp_path: Path) -> None:
    path = tmp_path / "speed_up.image"
    figure = plot_speed_up(ROWS, "Decode", 2e-3, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n"), "a PNG whatever its name"
    (axes,) = figure.axes
    assert axes.get_title() == "Decode" and "(sub-blocks)" in axes.get_xlabel()
    bars = {container.get_label(): container for container in axes.containers}
    line, _, (quartiles,) = bars["ladder"].lines
    assert line.get_xydata().tolist() == [[0.0, 1.0], [0.5, 1.7], [1.0, 1.4]]
    ends = [segment[:, 1] for segment in quartiles.get_segments()]
    assert np.allclose(ends, [[0.985, 1.015], [1.66, 1.74], [1.38, 1.42]])
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines["no-comm (bound)"] == [[0.0, 1.05], [1.0, 3.0]]
    dashed = [line.get_xydata().tolist() for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert [[0.0, 1.0], [0.5, 1.8], [1.0, 1.5]] in dashed
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(shown) == ["ladder", "no-comm (bound)", "parallel", "step-time model"]
    low, high = axes.get_ylim()
    assert low < 0.98 and 1.8 < high < 3.0


@pytest.mark.parametrize("module", ["lab.bench.paired", "lab.bench.results", "lab.cost.links"])
def test_importing_is_light(module: str) -> None:
    heavy = "{'matplotlib', 'torch', 'deepspeed', 'numpy'}"
    script = f"import sys, megatron_ladder.{module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
