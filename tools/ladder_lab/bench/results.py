"""The results of a benchmark: rows and their tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from ladder_lab.bench.paired import RatioVerdict

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
