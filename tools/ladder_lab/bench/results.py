"""The results of a benchmark: rows and their tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from ladder_lab.bench.paired import RatioVerdict
from ladder_lab.output import markdown_table


@dataclass(frozen=True)
class BenchmarkRow:
    """One wiring at one interconnect time: medians of a pass (a decoded token, a prefill, forward and backward, or
    forward).

    An all-reduce, or between expert-parallel ranks an all-to-all, takes `alpha_seconds`. The ratio, standard over this
    wiring, is the median of the rounds' paired ratios, and the spread is their interquartile range.
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
    """Beyond the time without reduces if emulated on one GPU; None on several, where traces show it."""
    verdict: str
    multiprocessors: int | None = None
    """Those that a collective takes, if emulated on one GPU."""
    skew_seconds: float = 0.0
    """Time by which the latest rank prolongs each collective."""


def results_table(rows: Sequence[BenchmarkRow]) -> str:
    """Return the rows as a Markdown table."""
    table = []
    for row in rows:
        exposed = row.exposed_seconds_per_layer
        wire = f"{row.interconnect}, {row.alpha} = {1e3 * row.alpha_seconds:.3f} ms"
        if row.multiprocessors is not None:
            wire += f", SMs {row.multiprocessors}, skew {1e6 * row.skew_seconds:g} us"
        table.append(
            {
                "wire": wire,
                "wiring": row.wiring,
                "ms": f"{1e3 * row.median_seconds:.2f}",
                "standard / it": f"{row.ratio_to_standard:.3f}",
                "spread": f"{row.spread:.3f}",
                "model": f"{row.predicted_ratio:.3f}",
                "share": f"{row.ratio_to_standard / row.predicted_ratio:.2f}",
                "exposed ms a layer": "" if exposed is None else f"{1e3 * exposed:.3f}",
                "": "" if row.verdict == RatioVerdict.SOUND.value else row.verdict,
            }
        )
    return markdown_table(table)
