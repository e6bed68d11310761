"""Speed-up over interconnect time, with the bound that no interconnect can beat drawn in."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ladder.lab.bench.paired import Ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADROOM = 1.08
"""How far the ratio axis reaches above the curves: the bound rises beyond every picture."""


@dataclass(frozen=True)
class Point:
    """A speed-up at one interconnect time."""

    all_reduce_seconds: float
    """Time of one all-reduce."""
    ratio: Ratio
    """Measured, over the standard wiring."""
    predicted: float | None = None
    """By the step-time model; None where it was not asked."""


@dataclass(frozen=True)
class Curve:
    """One wiring over all interconnect times, ascending."""

    label: str
    points: tuple[Point, ...]


def plot_speed_up(
    curves: Sequence[Curve], bound: Curve, path: Path, *, title: str, unit_seconds: float = 1e-3, unit: str = "ms"
) -> None:
    """Writes the picture of `draw_speed_up` as a PNG; the folder of `path` is there."""
    figure = draw_speed_up(curves, bound, title=title, unit_seconds=unit_seconds, unit=unit)
    figure.savefig(path, format="png", dpi=120)


def draw_speed_up(
    curves: Sequence[Curve], bound: Curve, *, title: str, unit_seconds: float = 1e-3, unit: str = "ms"
) -> "Figure":
    """Measured medians with their quartiles, predictions dashed, the bound as the edge of a grey area.

    Args:
        curves: the wirings.
        bound: the same without communication.
        unit_seconds: what 1 on the axis of interconnect times is: the sub-block's compute time, say.
        unit: its name.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not above: matplotlib comes with the extra [plot], and importing it takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    measured = [point for curve in curves for point in curve.points]
    top = HEADROOM * max(1.0, *(max(point.ratio.high, point.predicted or 0.0) for point in measured))
    lowest = min(point.ratio.low for point in [*measured, *bound.points])
    _draw_bound(axes, bound, unit_seconds, top)
    for number, curve in enumerate(curves):
        _draw_curve(axes, curve, f"C{number}", unit_seconds)
    if any(point.predicted is not None for point in measured):
        axes.plot([], [], color="0.35", linestyle="--", linewidth=1, label="step-time model")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(min(0.95, lowest - 0.05), top)
    axes.set_xlabel(f"time of one all-reduce ({unit})")
    axes.set_ylabel("speed-up over the standard wiring")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    return figure


def _draw_bound(axes: "Axes", bound: Curve, unit_seconds: float, top: float) -> None:
    times = [point.all_reduce_seconds / unit_seconds for point in bound.points]
    medians = [point.ratio.median for point in bound.points]
    axes.plot(times, medians, color="0.35", linewidth=1.5, label=f"{bound.label} (bound)")
    axes.fill_between(times, medians, [max(top, median) for median in medians], color="0.88", linewidth=0)


def _draw_curve(axes: "Axes", curve: Curve, color: str, unit_seconds: float) -> None:
    times = [point.all_reduce_seconds / unit_seconds for point in curve.points]
    medians = [point.ratio.median for point in curve.points]
    below = [point.ratio.median - point.ratio.low for point in curve.points]
    above = [point.ratio.high - point.ratio.median for point in curve.points]
    axes.errorbar(
        times, medians, yerr=(below, above), color=color, marker="o", markersize=5, capsize=3, label=curve.label
    )
    predicted = [
        (time, point.predicted)
        for time, point in zip(times, curve.points, strict=True)
        if point.predicted is not None
    ]
    if predicted:
        axes.plot(*zip(*predicted, strict=True), color=color, linestyle="--", linewidth=1)
