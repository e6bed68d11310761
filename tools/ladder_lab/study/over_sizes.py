"""How the losses of a study at equal tokens, and their differences from standard, depend on the size of the model."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ladder_lab.effective_speed import PUBLISHED, ScalingLaw
from ladder_lab.output import markdown_table
from ladder_lab.study.figures import (
    at_equal_tokens,
    holm,
    losses_by_seed,
    number,
    paired,
    power_law,
    trend,
    verdict,
    with_interval,
)
from ladder_lab.study.trials import STANDARD, transferred_rate

PICTURE_NAME = "sizes.png"
Losses = Mapping[int, Mapping[int, float]]
"""Parameters of a size, ascending -> seed -> final loss."""


def transferred_rates(study: Mapping[str, Any]) -> str:
    """Return a table of the rates of the two narrowest sizes, and what the rule for larger ones says of the second."""
    if not study["settings"]["transfer_rates"]:
        return ""
    first, second, *_ = sorted(study["sizes"], key=lambda size: study["sizes"][size]["width"])
    rows = []
    for wiring in study["settings"]["wirings"]:
        rates = [study["chosen"].get(f"{size}/{wiring}") for size in (first, second)]
        if None not in rates:
            predicted = transferred_rate(rates[0], first, second)
            row = {f"chosen for {first}": rates[0], f"predicted for {second}": predicted, "chosen": rates[1]}
            rows.append({"wiring": wiring} | {name: f"{rate:g}" for name, rate in row.items()})
    return "Learning rates fall with the hidden size:\n\n" + markdown_table(rows) if rows else ""


def scaling_law(study: Mapping[str, Any], runs: pd.DataFrame) -> ScalingLaw:
    """Return the law of standard's losses over compute where the runs determine it, otherwise the published one."""
    compute = {facts["parameters"]: facts["parameters"] * facts["iterations"] for facts in study["sizes"].values()}
    standard = _losses(study, runs).get(STANDARD, {})
    fit = power_law([(compute[size], loss) for size, by_seed in standard.items() for loss in by_seed.values()])
    if fit is None:
        return PUBLISHED
    return ScalingLaw(fit["alpha"][0], fit["E"][0], f"fitted to the losses of {STANDARD} over parameters x tokens")


def over_sizes(study: Mapping[str, Any], runs: pd.DataFrame, folder: Path) -> list[str]:
    """Return tables of a study with several sizes, and draw its picture."""
    losses = _losses(study, runs)
    standard = losses.pop(STANDARD, {})
    if len(standard) < 2 or not losses:
        return []
    gaps = {wiring: _gaps(of_wiring, standard) for wiring, of_wiring in losses.items()}
    trends = {wiring: trend(points) for wiring, points in gaps.items()}
    adjusted = dict(zip(trends, holm([line["p"] for line in trends.values()]), strict=True))
    rows = []
    for wiring, of_wiring in losses.items():
        differences = {size: paired(of_wiring.get(size, {}), standard[size]) for size in standard}
        line = trends[wiring]
        rows.append(
            {"wiring": wiring}
            | {f"{size:,}": with_interval(gap["mean"], gap) for size, gap in differences.items()}
            | {
                "per doubling": with_interval(line["slope"], line),
                "trend": verdict(line, adjusted[wiring], "falls", "grows", "none found"),
            }
        )
    _draw(gaps, trends, folder / PICTURE_NAME)
    return [
        "## Over sizes",
        f"Loss minus {STANDARD}'s by parameters that a token uses, and the slope of a line through the pairs of runs:",
        markdown_table(rows),
        _fits({STANDARD: standard, **losses}),
        f"![Loss minus {STANDARD}'s over parameters]({PICTURE_NAME})",
    ]


def _losses(study: Mapping[str, Any], runs: pd.DataFrame) -> dict[str, dict[int, dict[int, float]]]:
    """Return the losses at equal tokens of each wiring."""
    losses: dict[str, dict[int, dict[int, float]]] = {}
    for size, facts in sorted(study["sizes"].items(), key=lambda item: item[1]["parameters"]):
        for wiring, wiring_runs in at_equal_tokens(study, runs, size).groupby("wiring", sort=False):
            losses.setdefault(wiring, {})[facts["parameters"]] = losses_by_seed(wiring_runs)
    return losses


def _gaps(losses: Losses, standard: Losses) -> list[tuple[float, float]]:
    """Return log2 of the parameters, and the difference from standard, of each pair of runs."""
    return [
        (math.log2(size), by_seed[seed] - standard[size][seed])
        for size, by_seed in losses.items()
        for seed in sorted(by_seed.keys() & standard.get(size, {}).keys())
    ]


def _fits(losses: Mapping[str, Losses]) -> str:
    rows = []
    for wiring, of_wiring in losses.items():
        fit = power_law([(size, loss) for size, by_seed in of_wiring.items() for loss in by_seed.values()])
        if fit is not None:
            cells = {name: f"{number(value, '.3f')} ± {number(half, '.3f')}" for name, (value, half) in fit.items()}
            rows.append({"wiring": wiring} | cells)
    smallest = min(next(iter(losses.values())))
    law = f"loss = E + A (N / {smallest:,})^-alpha"
    if not rows:
        return f"The runs do not determine {law}."
    return f"Where the runs determine {law}, with 95 % intervals:\n\n{markdown_table(rows)}"


def _draw(
    gaps: Mapping[str, Sequence[tuple[float, float]]], trends: Mapping[str, Mapping[str, float]], path: Path
) -> None:
    """Draw mean and range over seeds of the differences at each size, with their lines, as a PNG."""
    # Imported here because matplotlib takes a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (wiring, points) in enumerate(gaps.items()):
        by_size = (
            pd.DataFrame(points, columns=["doublings", "gap"]).groupby("doublings").gap.agg(["mean", "min", "max"])
        )
        # Bars of several wirings must not cover each other.
        positions = 2.0 ** (by_size.index + 0.04 * (index - (len(gaps) - 1) / 2))
        ranges = (by_size["mean"] - by_size["min"], by_size["max"] - by_size["mean"])
        marks = axes.errorbar(positions, by_size["mean"], yerr=ranges, fmt="o", capsize=3, label=wiring)
        ends = np.array([by_size.index.min(), by_size.index.max()])
        line = trends[wiring]
        axes.plot(2.0**ends, line["intercept"] + line["slope"] * ends, color=marks[0].get_color(), alpha=0.6)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel(f"validation loss minus {STANDARD}'s (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=130)
