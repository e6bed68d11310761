"""The pictures of a study's report: loss curves with the spread over seeds, and paired differences with intervals.

A wiring has one colour in all of them: those of Okabe and Ito, which people who are colour-blind tell apart.
"""

import importlib.util
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ladder.data.files import write_atomically
from megatron_ladder.errors import UserError
from megatron_ladder.lab.study.gathered import Curve, Gathered, Terms
from megatron_ladder.lab.study.statistics import interpolated, mean
from megatron_ladder.lab.study.wirings import STANDARD

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The baseline's first. Without the palette's yellow, which is lost on white."""
STYLES = ("-", "--", ":", "-.")
"""When all colours are used up, they begin again in the next one."""
SHOWN_FROM = 0.3
"""Share of the run before which losses fall too fast to show a difference between wirings."""
DOTS_PER_INCH = 130
AXIS: Mapping[Terms, str] = {"tokens": "tokens (millions)", "time": f"time (steps of {STANDARD} under the link)"}


def require_matplotlib() -> None:
    """Raises UserError if the extra that draws is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the report's pictures: matplotlib is not installed: pip install matplotlib")


def styles(gathered: Gathered) -> dict[str, tuple[str, str]]:
    """Wiring -> its colour and line style, the same in every picture of the study."""
    pairs = ((colour, style) for style in itertools.cycle(STYLES) for colour in COLOURS)
    return dict(zip(dict.fromkeys([*gathered.wirings("tokens"), *gathered.wirings("time")]), pairs, strict=False))


def write_png(figure: "Figure", path: Path) -> None:
    """Writes a picture whole, or leaves what was there."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    write_atomically(path, content.getvalue())


def drawable(gathered: Gathered, size: str) -> list[Terms]:
    """At equal what there are a baseline and curves to draw."""
    both: tuple[Terms, Terms] = ("tokens", "time")
    return [
        terms
        for terms in both
        if gathered.curves(terms, size, STANDARD)
        and (terms == "tokens" or any(gathered.runs(terms, size, one) for one in gathered.wirings(terms)[1:]))
    ]


def draw_curves(gathered: Gathered, size: str) -> "Figure":
    """Validation losses above, their paired differences to the baseline below; over tokens and over time.

    Lines are means over seeds, bands reach from the least to the greatest.
    """
    # Not above: matplotlib comes with the extra [plot], and importing it takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = drawable(gathered, size)
    figure = Figure(figsize=(1.5 + 4.5 * len(columns), 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 2])
    lines: dict[str, Artist] = {}
    losses: list[Summary] = []
    differences: list[Summary] = []
    looks = styles(gathered)
    for terms, above, below in zip(columns, panels[0], panels[1], strict=True):
        scale = 1e-6 if terms == "tokens" else 1.0
        baseline = gathered.curves(terms, size, STANDARD)
        end = max(curve[-1][0] for curve in baseline.values())
        for wiring in gathered.wirings(terms):
            curves = gathered.curves(terms, size, wiring)
            points = summarised(curves, SHOWN_FROM * end)
            if points:
                lines[wiring] = _draw_band(above, points, looks[wiring], scale)
                losses += points
            if wiring != STANDARD:
                points = summarised(difference_curves(curves, baseline), SHOWN_FROM * end)
                _draw_band(below, points, looks[wiring], scale)
                differences += points
        below.axhline(0.0, color=COLOURS[0], linewidth=1.6)
        below.set_xlabel(AXIS[terms])
        below.set_xlim(SHOWN_FROM * end * scale, 1.01 * end * scale)
        for panel in (above, below):
            panel.grid(alpha=0.3)
    end = max(curve[-1][0] for curve in gathered.curves("tokens", size, STANDARD).values())
    standard = summarised(gathered.curves("tokens", size, STANDARD), SHOWN_FROM * end)
    fall = max(high for *_, high in standard) - min(low for _, _, low, _ in standard)
    _limit(panels[0][0], shown_range(losses, max(high for *_, high in standard) + fall))
    _limit(panels[1][0], shown_range(differences, fall))
    panels[0][0].set_ylabel("validation loss (nats per token)")
    panels[1][0].set_ylabel(f"less {STANDARD}'s, paired (nats)")
    figure.suptitle(f"{size}: mean over seeds\nband from least to greatest; the first {SHOWN_FROM:.0%} not shown")
    columns_of_legend = min(len(lines), 4)
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns_of_legend, frameon=False)
    return figure


def draw_differences(gathered: Gathered, size: str) -> "Figure":
    """Final losses less the baseline's of the same seed: a ring for each pair, the mean with its interval."""
    # Not above: matplotlib comes with the extra [plot], and importing it takes a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    looks = styles(gathered)
    rows = {terms: gathered.wirings(terms)[1:] for terms in drawable(gathered, size)}
    heights = [len(names) + 0.5 for names in rows.values()]
    figure = Figure(figsize=(8.5, 1.6 + 0.42 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (terms, names) in zip(panels, rows.items(), strict=True):
        comparisons = gathered.comparisons(terms, size)
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
        panel.set_title(f"at equal {terms}", loc="left", fontsize="medium")
        panel.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel(f"final validation loss less {STANDARD}'s (nats per token): left of 0 is better")
    figure.suptitle(f"{size}: a ring for each seed, mean with its 95 % interval")
    return figure


Summary = tuple[float, float, float, float]
"""Position, and mean, least and greatest over seeds."""


def shown_range(points: Sequence[Summary], most: float) -> tuple[float, float] | None:
    """Of an axis: what is drawn, with a margin, less what is above `most` (a run that diverges). None for nothing."""
    kept = [(low, high) for _, _, low, high in points if math.isfinite(high) and high <= most]
    if not kept:
        return None
    low, high = min(low for low, _ in kept), max(high for _, high in kept)
    margin = 0.04 * (high - low) or 0.01
    return low - margin, high + margin


def summarised(curves: Mapping[int, Curve], start: float) -> list[Summary]:
    """Mean and range over seeds wherever all of them have a point, from the last position before `start` on."""
    if not curves:
        return []
    losses = [dict(curve) for curve in curves.values()]
    shared = sorted(set.intersection(*(set(one) for one in losses)))
    kept = [position for number, position in enumerate(shared) if (shared[number + 1 :] or [math.inf])[0] > start]
    values = ((position, [one[position] for one in losses]) for position in kept)
    return [(position, mean(found), min(found), max(found)) for position, found in values]


def difference_curves(curves: Mapping[int, Curve], baseline: Mapping[int, Curve]) -> dict[int, Curve]:
    """Curves less the baseline's of the same seed, at the baseline's positions that both reach.

    Runs of equal time end together up to a part of a step, for they have whole ones.
    """
    found: dict[int, Curve] = {}
    for seed in curves.keys() & baseline.keys():
        last = curves[seed][-1][0]
        ends = {position: last for position, _ in baseline[seed] if last < position < last + 1}
        both = (
            (position, interpolated(curves[seed], ends.get(position, position)), loss)
            for position, loss in baseline[seed]
        )
        found[seed] = tuple((position, value - loss) for position, value, loss in both if value is not None)
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
