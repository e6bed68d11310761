"""The results of a benchmark: rows, their table, and a plot of the speed-up over the interconnect's time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ladder_lab.bench.paired import RatioVerdict
from ladder_lab.markdown import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADROOM = 1.08
"""How far the ratio axis reaches above the curves; the bound leaves the plot at the top."""
TABLE_HEAD = (
    "| all-reduce | wiring | ms | standard / it | spread | model | share | exposed ms a layer | |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class BenchmarkRow:
    """One wiring at one interconnect time: medians of a pass (a decoded token, a prefill, or forward and backward).

    An all-reduce takes `alpha_seconds`. The ratio, standard over this wiring, is the median of the rounds' paired
    ratios, and the spread is their interquartile range.
    """

    case: str
    size: str
    wiring: str
    interconnect: str
    alpha: str
    alpha_seconds: float
    median_seconds: float
    ratio_to_standard: float
    spread: float
    predicted_ratio: float
    exposed_seconds_per_layer: float | None
    """None if it was not measured."""
    verdict: str


def results_table(rows: Sequence[BenchmarkRow]) -> str:
    """Return the rows as lines of a Markdown table below `TABLE_HEAD`."""

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.{2 if seconds >= 1e-4 or not seconds else 4}f} ms"

    def exposed(row: BenchmarkRow) -> str:
        return "" if row.exposed_seconds_per_layer is None else f"{1e3 * row.exposed_seconds_per_layer:.3f}"

    return "\n".join(
        f"| {row.interconnect}, {row.alpha} = {milliseconds(row.alpha_seconds)} "
        f"| {row.wiring} | {1e3 * row.median_seconds:.2f} "
        f"| {row.ratio_to_standard:.3f} | {row.spread:.3f} | {row.predicted_ratio:.3f} "
        f"| {row.ratio_to_standard / row.predicted_ratio:.2f} | {exposed(row)} "
        f"| {'' if row.verdict == RatioVerdict.SOUND.value else row.verdict} |"
        for row in rows
    )


@dataclass(frozen=True)
class RequestRow:
    """One wiring with batches of whole requests: medians over the rounds.

    The speed-up over standard is the median of the rounds' paired ratios, and the spread is their interquartile range.
    """

    size: str
    wiring: str
    interconnect: str
    alpha: str
    decode_reduce_seconds: float
    prefill_reduce_seconds: float
    """Times of one all-reduce in a decode step and in the prefill of the whole batch."""
    ranks: int
    batch: int
    prompt: int
    generate: int
    tokens_per_second: float
    """New tokens of the batch over the time of prefill and decoding."""
    first_token_seconds: float
    decode_step_seconds: float
    speed_up: float
    spread: float
    predicted: float
    """Speed-up according to the step-time model."""
    predicted_range: tuple[float, float]
    """The same for all-reduces `LINK_ERROR` times faster and slower."""
    published_tokens_per_second: float | None
    published_speed_up: float | None
    """The paper's figures for this setting; None where it has none."""
    verdict: str

    @property
    def published(self) -> str:
        """The paper's figure as text."""
        if self.published_tokens_per_second is not None:
            return f"{self.published_tokens_per_second:,.1f} tokens/s"
        return "" if self.published_speed_up is None else f"{self.published_speed_up:.3g}"


def requests_table(rows: Sequence[RequestRow]) -> str:
    """Return a Markdown table of the wirings in one setting."""
    return markdown_table(
        [
            {
                "wiring": row.wiring,
                "tokens/s": f"{row.tokens_per_second:,.1f}",
                "first token ms": f"{1e3 * row.first_token_seconds:.1f}",
                "decode step ms": f"{1e3 * row.decode_step_seconds:.2f}",
                "speed-up": f"{row.speed_up:.3f}",
                "spread": f"{row.spread:.3f}",
                "model (range)": "{:.2f} ({:.2f} to {:.2f})".format(row.predicted, *row.predicted_range),
                "paper": row.published,
                "": "" if row.verdict == RatioVerdict.SOUND.value else row.verdict,
            }
            for row in rows
        ]
    )


def plot_requests(rows: Sequence[RequestRow], path: Path) -> "Figure":
    """Draw the speed-up of every wiring as a PNG, with a panel for each setting.

    Bars are measured medians with their spread, grey areas the model's ranges, and stars the paper's figures.
    """
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys((row.size, row.batch, row.alpha) for row in rows))
    columns = min(4, len(settings))
    lines = -(-len(settings) // columns)
    figure = Figure(figsize=(1 + 3.2 * columns, 0.6 + 3.2 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for unused in panels[len(settings) :]:
        unused.set_axis_off()
    for panel, (size, batch, alpha) in zip(panels, settings, strict=False):
        own = [row for row in rows if (row.size, row.batch, row.alpha) == (size, batch, alpha)]
        own = [row for row in own if row.wiring != "standard"]
        places = range(len(own))
        panel.bar(places, [row.speed_up for row in own], yerr=[row.spread / 2 for row in own], capsize=3, color="C0")
        for place, row in zip(places, own, strict=True):
            low, high = row.predicted_range
            panel.bar(place, high - low, bottom=low, width=0.95, color="0.5", alpha=0.35)
            if row.published_speed_up is not None:
                panel.plot(place, row.published_speed_up, marker="*", color="C3", markersize=12)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xticks(places, [row.wiring for row in own], rotation=60, ha="right", fontsize=8)
        panel.set_title(f"{size}, batch {batch}, {alpha}", fontsize=9)
        panel.grid(axis="y", alpha=0.3)
    figure.supylabel("speed-up over the standard wiring")
    figure.savefig(path, format="png", dpi=120)
    return figure


def plot_speed_up(rows: Sequence[BenchmarkRow], title: str, sub_block_seconds: float, path: Path) -> "Figure":
    """Draw measured medians with their spread, predictions dashed, and the bound as the edge of a grey area, as a PNG.

    The unit of the axis of interconnect times is `sub_block_seconds`.
    """
    # Imported here because matplotlib comes with the extra [plot] and takes a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    bound = [row for row in rows if row.wiring == "no-comm"]
    measured = [row for row in rows if row.wiring not in ("standard", "no-comm", "no-comm-parallel")]
    highest = max(max(row.ratio_to_standard + row.spread / 2, row.predicted_ratio) for row in measured)
    top = HEADROOM * max(1.0, highest)
    lowest = min(row.ratio_to_standard - row.spread / 2 for row in [*measured, *bound])

    def points(curve: Sequence[BenchmarkRow]) -> tuple[list[float], list[float]]:
        return [row.alpha_seconds / sub_block_seconds for row in curve], [row.ratio_to_standard for row in curve]

    times, ratios = points(bound)
    axes.plot(times, ratios, color="0.35", linewidth=1.5, label="no-comm (bound)")
    axes.fill_between(times, ratios, [max(top, ratio) for ratio in ratios], color="0.88", linewidth=0)
    for number, wiring in enumerate(dict.fromkeys(row.wiring for row in measured)):
        curve = [row for row in measured if row.wiring == wiring]
        times, ratios = points(curve)
        halves, color = [row.spread / 2 for row in curve], f"C{number}"
        axes.errorbar(times, ratios, yerr=halves, color=color, marker="o", markersize=5, capsize=3, label=wiring)
        axes.plot(times, [row.predicted_ratio for row in curve], color=color, linestyle="--", linewidth=1)
    axes.plot([], [], color="0.35", linestyle="--", linewidth=1, label="step-time model")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(min(0.95, lowest - 0.05), top)
    axes.set_xlabel("time of one all-reduce (sub-blocks)")
    axes.set_ylabel("speed-up over the standard wiring")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, format="png", dpi=120)
    return figure
