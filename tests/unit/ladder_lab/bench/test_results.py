"""The plot's numbers and its file, and that importing the benchmark's modules is cheap."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ladder_lab.bench.results import BenchmarkRow, plot_requests, plot_speed_up, requests_table
from tests.unit.ladder_lab.bench.made_up import request_row

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


def test_requests_next_to_the_paper(tmp_path: Path) -> None:
    rows = [
        request_row("standard", 1.0, published_tokens_per_second=77.39),
        request_row("ladder", 1.25, spread=0.04, predicted_range=(1.2, 1.4), published_speed_up=1.308),
        request_row("no-comm", 1.5, verdict="too noisy to judge"),
    ]
    _, _, standard, ladder, no_comm = requests_table(rows).splitlines()
    assert standard == "| standard | 100.0 | 20.0 | 4.00 | 1.000 | 0.000 | 1.00 (1.00 to 1.00) | 77.4 tokens/s |  |"
    assert ladder == "| ladder | 100.0 | 20.0 | 4.00 | 1.250 | 0.040 | 1.00 (1.20 to 1.40) | 1.31 |  |"
    assert no_comm.endswith("|  | too noisy to judge |")
    path = tmp_path / "requests.png"
    figure = plot_requests([*rows, request_row("standard", 1.0, batch=4), request_row("ladder", 1.1, batch=4)], path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    first, second = figure.axes
    assert [label.get_text() for label in first.get_xticklabels()] == ["ladder", "no-comm"]
    assert [bar.get_height() for bar in first.containers[1]] == [1.25, 1.5]
    (star,) = (line for line in first.get_lines() if line.get_marker() == "*")
    assert star.get_xydata().tolist() == [[0.0, 1.308]]
    assert "batch 4" in second.get_title() and [bar.get_height() for bar in second.containers[1]] == [1.1]


@pytest.mark.parametrize("module", ["lab.bench.paired", "lab.bench.paper", "lab.bench.results", "lab.cost.links"])
def test_importing_is_light(module: str) -> None:
    heavy = "{'matplotlib', 'torch', 'deepspeed', 'numpy'}"
    script = f"import sys, megatron_ladder.{module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
