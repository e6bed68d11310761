"""The pictures of a study's report: loss curves with the spread over seeds, and paired differences with intervals.

A wiring has the same colour in all of them, from the colour-blind safe palette of Okabe and Ito.
"""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ladder.files import write_atomically
from megatron_ladder.lab.study.results import Budget, Curve, StudyResults
from megatron_ladder.lab.study.statistics import mean
from megatron_ladder.lab.study.wirings import STANDARD

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The first one is the baseline's. Without the palette's yellow, which is invisible on white."""
STYLES = ("-", "--", ":", "-.")
"""After all colours are used, they repeat in the next style."""
SHOWN_FROM = 0.3
"""Share of the run that is not drawn, because its losses fall too fast to show differences."""
DOTS_PER_INCH = 130
AXIS: Mapping[Budget, str] = {"tokens": "tokens (millions)", "time": f"time (steps of {STANDARD} under the link)"}


def _styles(results: StudyResults) -> dict[str, tuple[str, str]]:
    """Map each wiring to its colour and line style in all pictures of the study."""
    pairs = ((colour, style) for style in itertools.cycle(STYLES) for colour in COLOURS)
    return dict(zip(dict.fromkeys([*results.wirings("tokens"), *results.wirings("time")]), pairs, strict=False))


def write_png(figure: "Figure", path: Path) -> None:
    """Write a picture atomically."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    write_atomically(path, content.getvalue())


def drawable(results: StudyResults, size: str) -> list[Budget]:
    """Return the budgets for which there are a baseline and curves to draw."""
    both: tuple[Budget, Budget] = ("tokens", "time")
    return [
        budget
        for budget in both
        if results.curves(budget, size, STANDARD)
        and (budget == "tokens" or any(results.runs(budget, size, one) for one in results.wirings(budget)[1:]))
    ]


def draw_curves(results: StudyResults, size: str) -> "Figure":
    """Draw validation losses above and their paired differences from the baseline below, over tokens and time.

    Lines are means over seeds; bands span minimum to maximum.
    """
    # Imported here because matplotlib comes with the extra [plot] and takes a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = drawable(results, size)
    figure = Figure(figsize=(1.5 + 4.5 * len(columns), 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 2])
    lines: dict[str, Artist] = {}
    losses: list[Summary] = []
    differences: list[Summary] = []
    looks = _styles(results)
    for budget, above, below in zip(columns, panels[0], panels[1], strict=True):
        scale = 1e-6 if budget == "tokens" else 1.0
        baseline = results.curves(budget, size, STANDARD)
        end = max(curve[-1][0] for curve in baseline.values())
        for wiring in results.wirings(budget):
            curves = results.curves(budget, size, wiring)
            points = _summarised(curves, SHOWN_FROM * end)
            if points:
                lines[wiring] = _draw_band(above, points, looks[wiring], scale)
                losses += points
            if wiring != STANDARD:
                points = _summarised(_difference_curves(curves, baseline), SHOWN_FROM * end)
                _draw_band(below, points, looks[wiring], scale)
                differences += points
        below.axhline(0.0, color=COLOURS[0], linewidth=1.6)
        below.set_xlabel(AXIS[budget])
        below.set_xlim(SHOWN_FROM * end * scale, 1.01 * end * scale)
        for panel in (above, below):
            panel.grid(alpha=0.3)
    end = max(curve[-1][0] for curve in results.curves("tokens", size, STANDARD).values())
    standard = _summarised(results.curves("tokens", size, STANDARD), SHOWN_FROM * end)
    fall = max(high for *_, high in standard) - min(low for _, _, low, _ in standard)
    _limit(panels[0][0], _shown_range(losses, max(high for *_, high in standard) + fall))
    _limit(panels[1][0], _shown_range(differences, fall))
    panels[0][0].set_ylabel("validation loss (nats per token)")
    panels[1][0].set_ylabel(f"less {STANDARD}'s, paired (nats)")
    figure.suptitle(f"{size}: mean over seeds\nband from minimum to maximum; the first {SHOWN_FROM:.0%} not shown")
    columns_of_legend = min(len(lines), 4)
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns_of_legend, frameon=False)
    return figure


def draw_differences(results: StudyResults, size: str) -> "Figure":
    """Draw final losses less the baseline's of the same seed: a ring per pair, and the mean with its interval."""
    # Imported here because matplotlib comes with the extra [plot] and takes a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    looks = _styles(results)
    rows = {budget: results.wirings(budget)[1:] for budget in drawable(results, size)}
    heights = [len(names) + 0.5 for names in rows.values()]
    figure = Figure(figsize=(8.5, 1.6 + 0.42 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (budget, names) in zip(panels, rows.items(), strict=True):
        comparisons = results.comparisons(budget, size)
        for row, wiring in enumerate(names):
            one = comparisons[wiring].difference
            colour = looks[wiring][0]
            finite = [value for value in one.differences if math.isfinite(value)]
            panel.plot(finite, [row + 0.28] * len(finite), "o", color=colour, fillstyle="none", markersize=5)
            if math.isfinite(one.half_width):
                panel.errorbar(one.mean, row, xerr=one.half_width, color=colour, marker="D", markersize=5, capsize=4)
        panel.axvline(0.0, color=COLOURS[0], linewidth=1.2)
        panel.set_yticks(range(len(names)), labels=names)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.set_title(f"at equal {budget}", loc="left", fontsize="medium")
        panel.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel(f"final validation loss less {STANDARD}'s (nats per token): left of 0 is better")
    figure.suptitle(f"{size}: a ring per seed, mean with its 95 % interval")
    return figure


Summary = tuple[float, float, float, float]
"""Position, and mean, minimum and maximum over seeds."""


def _shown_range(points: Sequence[Summary], most: float) -> tuple[float, float] | None:
    """Return an axis range with a margin, without points above `most` (diverging runs); None without points."""
    kept = [(low, high) for _, _, low, high in points if math.isfinite(high) and high <= most]
    if not kept:
        return None
    low, high = min(low for low, _ in kept), max(high for _, high in kept)
    margin = 0.04 * (high - low) or 0.01
    return low - margin, high + margin


def _summarised(curves: Mapping[int, Curve], start: float) -> list[Summary]:
    """Return mean and range over seeds at their common positions, from the last position before `start` on."""
    if not curves:
        return []
    losses = [dict(curve) for curve in curves.values()]
    shared = sorted(set.intersection(*(set(one) for one in losses)))
    kept = [position for number, position in enumerate(shared) if (shared[number + 1 :] or [math.inf])[0] > start]
    values = ((position, [one[position] for one in losses]) for position in kept)
    return [(position, mean(found), min(found), max(found)) for position, found in values]


def _difference_curves(curves: Mapping[int, Curve], baseline: Mapping[int, Curve]) -> dict[int, Curve]:
    """Subtract the baseline's curve of the same seed, at the baseline's positions that both reach.

    Runs of equal time can differ in length by a fraction of a step, because they have whole steps.
    """
    import numpy as np

    found: dict[int, Curve] = {}
    for seed in curves.keys() & baseline.keys():
        first, last = curves[seed][0][0], curves[seed][-1][0]
        ends = {position: last for position, _ in baseline[seed] if last < position < last + 1}
        points = [(position, ends.get(position, position), loss) for position, loss in baseline[seed]]
        reached = [point for point in points if first <= point[1] <= last]
        positions, losses = zip(*curves[seed], strict=True)
        values = np.interp([at for _, at, _ in reached], positions, losses)
        found[seed] = tuple(
            (position, float(value) - loss) for (position, _, loss), value in zip(reached, values, strict=True)
        )
    return found


def _draw_band(axes: "Axes", points: Sequence[Summary], look: tuple[str, str], scale: float) -> "Artist":
    positions = [position * scale for position, *_ in points]
    middles, lows, highs = ([point[index] for point in points] for index in (1, 2, 3))
    axes.fill_between(positions, lows, highs, color=look[0], alpha=0.13, linewidth=0)
    (line,) = axes.plot(positions, middles, color=look[0], linestyle=look[1], linewidth=1.6)
    return line


def _limit(axes: "Axes", shown: tuple[float, float] | None) -> None:
    if shown is not None:
        axes.set_ylim(*shown)
