"""The results of a benchmark: rows and their tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from ladder_lab.bench.paired import RatioVerdict
from ladder_lab.markdown import markdown_table

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
