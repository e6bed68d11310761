"""The pictures of a study's report: loss curves with the spread over seeds, and paired differences with intervals."""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ladder_lab.study.results import BUDGETS, Budget, Curve, StudyResults
from ladder_lab.study.statistics import mean
from ladder_lab.study.wirings import STANDARD
from megatron_ladder.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The colour-blind safe palette of Okabe and Ito without yellow; the first one is the baseline's."""
STYLES = ("-", "--", ":", "-.")
"""After all colours are used, they repeat in the next style."""
SHOWN_FROM = 0.3
"""Share of the run that is not drawn, because its losses fall too fast to show differences."""
DOTS_PER_INCH = 130
Summary = tuple[float, float, float, float]
"""Position, and mean, minimum and maximum over seeds."""
AXIS: Mapping[Budget, str] = {"tokens": "tokens (millions)", "time": f"time (steps of {STANDARD} under the link)"}


def _styles(results: StudyResults) -> dict[str, tuple[str, str]]:
    pairs = ((colour, style) for style in itertools.cycle(STYLES) for colour in COLOURS)
    return dict(zip(dict.fromkeys([*results.wirings("tokens"), *results.wirings("time")]), pairs, strict=False))


def write_png(figure: "Figure", path: Path) -> None:
    """Write a picture atomically."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    write_atomically(path, content.getvalue())


def drawable(results: StudyResults, size: str) -> list[Budget]:
    """Return the budgets for which there are a baseline and curves to draw."""
    found: list[Budget] = [budget for budget in BUDGETS if results.curves(budget, size, STANDARD)]
    is_timed = any(results.runs("time", size, one) for one in results.wirings("time")[1:])
    return [budget for budget in found if budget == "tokens" or is_timed]


def draw_curves(results: StudyResults, size: str) -> "Figure":
    """Draw validation losses and below them their paired differences from the baseline, over tokens and time."""
    # Imported here because matplotlib comes with the extra [plot] and takes a second to import.
    from matplotlib.figure import Figure

    columns = drawable(results, size)
    figure = Figure(figsize=(1.5 + 4.5 * len(columns), 7.2), layout="constrained")
    panels = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 2])
    lines: dict[str, Artist] = {}
    shown: dict[str, list[Summary]] = {"losses": [], "differences": []}
    looks = _styles(results)
    for budget, above, below in zip(columns, *panels, strict=True):
        scale = 1e-6 if budget == "tokens" else 1.0
        baseline = results.curves(budget, size, STANDARD)
        end = max(curve[-1][0] for curve in baseline.values())
        for wiring in results.wirings(budget):
            curves = results.curves(budget, size, wiring)
            apart = {} if wiring == STANDARD else _difference_curves(curves, baseline)
            colour, style = looks[wiring]
            for panel, name, by_seed in ((above, "losses", curves), (below, "differences", apart)):
                points = _summarised(by_seed, SHOWN_FROM * end)
                shown[name] += points
                if points:
                    positions, means, lows, highs = zip(*points, strict=True)
                    scaled = [position * scale for position in positions]
                    panel.fill_between(scaled, lows, highs, color=colour, alpha=0.13, linewidth=0)
                    (lines[wiring],) = panel.plot(scaled, means, color=colour, linestyle=style, linewidth=1.6)
        below.axhline(0.0, color=COLOURS[0], linewidth=1.6)
        below.set_xlabel(AXIS[budget])
        below.set_xlim(SHOWN_FROM * end * scale, 1.01 * end * scale)
        for panel in (above, below):
            panel.grid(alpha=0.3)
    curves = results.curves("tokens", size, STANDARD)
    standard = _summarised(curves, SHOWN_FROM * max(curve[-1][0] for curve in curves.values()))
    highest = max(high for *_, high in standard)
    fall = highest - min(low for _, _, low, _ in standard)
    labels = {"losses": "validation loss (nats per token)", "differences": f"less {STANDARD}'s, paired (nats)"}
    for axes, name, most in zip(panels[:, 0], labels, (highest + fall, fall), strict=True):
        axes.set_ylabel(labels[name])
        if limits := _shown_range(shown[name], most):
            axes.set_ylim(*limits)
    figure.suptitle(f"{size}: mean over seeds\nband from minimum to maximum; the first {SHOWN_FROM:.0%} not shown")
    figure.legend([*lines.values()], [*lines], loc="outside lower center", ncols=min(len(lines), 4), frameon=False)
    return figure


def draw_differences(results: StudyResults, size: str) -> "Figure":
    """Draw final losses less the baseline's of the same seed: a ring per pair, and the mean with its interval."""
    # Imported here because matplotlib comes with the extra [plot] and takes a second to import.
    from matplotlib.figure import Figure

    looks = _styles(results)
    rows = {budget: results.wirings(budget)[1:] for budget in drawable(results, size)}
    heights = [len(names) + 0.5 for names in rows.values()]
    figure = Figure(figsize=(8.5, 1.6 + 0.42 * sum(heights)), layout="constrained")
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


def _shown_range(points: Sequence[Summary], most: float) -> tuple[float, float] | None:
    """Return an axis range with a margin, without points above `most` (diverging runs); None without points."""
    kept = [(low, high) for *_, low, high in points if math.isfinite(high) and high <= most]
    if not kept:
        return None
    low, high = min(low for low, _ in kept), max(high for _, high in kept)
    margin = 0.04 * (high - low) or 0.01
    return low - margin, high + margin


def _summarised(curves: Mapping[int, Curve], start: float) -> list[Summary]:
    """Return mean and range over seeds at their common positions, from the last position before `start` on."""
    losses = [dict(curve) for curve in curves.values()]
    shared = sorted(set.intersection(*map(set, losses))) if losses else []
    kept = [position for position, following in itertools.pairwise([*shared, math.inf]) if following > start]
    values = ((position, [one[position] for one in losses]) for position in kept)
    return [(position, mean(found), min(found), max(found)) for position, found in values]


def _difference_curves(curves: Mapping[int, Curve], baseline: Mapping[int, Curve]) -> dict[int, Curve]:
    """Subtract the baseline's curve of the same seed, at its positions that both reach, give or take a step."""
    import numpy as np

    found: dict[int, Curve] = {}
    for seed in curves.keys() & baseline.keys():
        positions, losses = zip(*curves[seed], strict=True)
        # Runs of equal time have whole steps, and so can differ in length by a fraction of one.
        points = [point for point in baseline[seed] if positions[0] <= point[0] < positions[-1] + 1]
        found[seed] = tuple((at, float(np.interp(at, positions, losses)) - loss) for at, loss in points)
    return found
