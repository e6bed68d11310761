"""The pictures of a study, and that importing the report is cheap."""

import math
from pathlib import Path

import pytest

from ladder_lab.study.figures import (
    COLOURS,
    _difference_curves,
    _shown_range,
    _styles,
    _summarised,
    draw_curves,
    draw_differences,
    write_png,
)
from ladder_lab.study.results import read_results
from tests.unit.ladder_lab.study.synthetic import made_up_study, write_all

ROOT = Path(__file__).resolve().parents[4]


def test_curves_are_means_with_bands_and_paired_differences(tmp_path: Path) -> None:
    write_all(tmp_path, made_up_study(), {"ladder": 0.2}, noise=0.0)
    results = read_results(tmp_path)
    figure = draw_curves(results, "tiny")
    loss, later_loss, apart, later_apart = figure.axes
    lines = {line.get_color(): line.get_xydata().tolist() for line in loss.get_lines()}
    standard, ladder = (lines[_styles(results)[name][0]] for name in ("standard", "ladder"))
    assert standard[-1] == pytest.approx([0.1, 3.2]) and ladder[-1] == pytest.approx([0.1, 3.4])
    assert standard[0] == pytest.approx([0.03, 3.9])
    bands = [band.get_paths()[0].vertices[:, 1] for band in loss.collections]
    assert [min(bands[0]), max(bands[0])] == pytest.approx([3.1, 4.0])
    below = {line.get_color(): line.get_xydata().tolist() for line in apart.get_lines()}
    assert below[_styles(results)["ladder"][0]][-1] == pytest.approx([0.1, 0.2])
    in_time = {line.get_color(): line.get_xydata().tolist() for line in later_apart.get_lines()}
    assert in_time[_styles(results)["ladder"][0]][-1] == pytest.approx([100, -0.2])
    assert len(later_loss.get_lines()) == 3
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["standard", "parallel", "ladder", "hybrid"]
    assert all(axes.get_legend() is None for axes in figure.axes)
    low, high = loss.get_ylim()
    assert 2.7 < low < 2.9 and 4.1 < high < 4.3


def test_dots_are_pairs_and_bars_are_intervals(tmp_path: Path) -> None:
    write_all(tmp_path, made_up_study(), {"ladder": 0.2}, noise=0.01)
    results = read_results(tmp_path)
    tokens, time = draw_differences(results, "tiny").axes
    assert [label.get_text() for label in tokens.get_yticklabels()] == ["parallel", "ladder", "hybrid"]
    assert [label.get_text() for label in time.get_yticklabels()] == ["parallel", "ladder"]
    found = results.comparisons("tokens", "tiny")["ladder"].difference
    (ring,) = [one for one in tokens.get_lines() if one.get_color() == COLOURS[2] and len(one.get_xdata()) == 3]
    assert ring.get_xdata().tolist() == list(found.differences)
    _, _, (bar,) = tokens.containers[1].lines
    assert bar.get_segments()[0][:, 0].tolist() == pytest.approx(list(found.interval))


def test_any_number_of_wirings_has_distinct_looks(tmp_path: Path) -> None:
    names = tuple(f"wiring-{number}" for number in range(12))
    write_all(tmp_path, made_up_study(wirings=("standard", *names), timed_wirings=("standard",)), {})
    looks = _styles(read_results(tmp_path))
    assert len(set(looks.values())) == 13 and looks["standard"] == ("#000000", "-")


def test_means_need_all_seeds_and_skip_the_first_part() -> None:
    curves = {1: ((1.0, 9.0), (2.0, 4.0), (3.0, 3.0)), 2: ((1.0, 7.0), (2.0, 2.0))}
    assert _summarised(curves, 0.0) == [(1.0, 8.0, 7.0, 9.0), (2.0, 3.0, 2.0, 4.0)]
    assert _summarised(curves, 1.5) == [(1.0, 8.0, 7.0, 9.0), (2.0, 3.0, 2.0, 4.0)]
    assert _summarised(curves, 2.0) == [(2.0, 3.0, 2.0, 4.0)]
    assert _summarised({}, 0.0) == []


def test_differences_are_paired_by_seed_and_reach_the_end() -> None:
    baseline = {1: ((50.0, 4.0), (100.0, 3.0)), 2: ((50.0, 0.0),)}
    found = _difference_curves({1: ((40.0, 5.0), (60.0, 4.0), (99.7, 2.5)), 3: ((50.0, 0.0),)}, baseline)
    assert found == {1: ((50.0, 0.5), (100.0, -0.5))}
    assert _difference_curves({1: ((40.0, 5.0), (60.0, 4.0))}, baseline) == {1: ((50.0, 0.5),)}


def test_a_run_that_diverges_does_not_set_the_range() -> None:
    points = [(1.0, 3.0, 2.0, 4.0), (2.0, 50.0, 3.0, 90.0), (3.0, math.inf, 3.0, math.inf)]
    assert _shown_range(points, 5.0) == pytest.approx((1.92, 4.08))
    assert _shown_range(points[1:], 5.0) is None


def test_a_png_is_written_atomically(tmp_path: Path) -> None:
    write_all(tmp_path, made_up_study(), {})
    write_png(draw_differences(read_results(tmp_path), "tiny"), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not list(tmp_path.glob("*.partial"))
