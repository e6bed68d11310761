"""What the data benchmark measures: a row of its table is a function, and this is what it takes and returns.

A row of another file is registered in `lab/bench/data_rows.py`.
"""

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.lab.bench.paired import PairedTimes, measure


@dataclass(frozen=True)
class DataBenchmark:
    """What a row may use."""

    folder: Path
    """Exists and is empty but for what rows put there; it is deleted afterwards."""
    rounds: int
    """Rounds that count, of ways that are compared."""
    megabytes: int
    """Size of the text that is tokenised, where a row does not say otherwise."""
    report: Callable[[str], None]
    """Takes a line that says what is being done."""


@dataclass(frozen=True)
class DataResult:
    """One figure beside its target."""

    row: str
    """Name of the row, as on the command line."""
    case: str
    """What was measured, in words."""
    figure: float | None
    """What was found; None if it could not be measured, and `note` says why."""
    unit: str
    """Of the figure."""
    target: float | None
    """What it is to reach; None if there is no target."""
    at_most: bool = False
    """Whether the target is an upper bound."""
    spread: float | None = None
    """Distance of the quartiles over the rounds."""
    note: str = ""
    """What else a reader should know."""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None if it cannot be said."""
        if self.figure is None or self.target is None:
            return None
        return self.figure <= self.target if self.at_most else self.figure >= self.target


DataRow = Callable[[DataBenchmark], Sequence[DataResult]]
"""Measures, and returns a line of the table for each case."""


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_cpu(benchmark: DataBenchmark, ways: dict[str, Callable[[], object]]) -> PairedTimes:
    """CPU seconds of every way, interleaved: a busy machine then disturbs all of them alike."""
    return measure(ways, benchmark.rounds, clock=cpu_seconds)


def table(results: Sequence[DataResult]) -> str:
    """The results as a table in Markdown."""
    lines = ["| row | what | figure | spread | target | |", "|---|---|---|---|---|---|"]
    for result in results:
        figure = "-" if result.figure is None else f"{result.figure:,.3g} {result.unit}"
        if result.figure is not None and result.figure >= 1000:
            figure = f"{result.figure:,.0f} {result.unit}"
        spread = "" if result.spread is None else f"{result.spread:.2g}"
        bound = "" if result.target is None else f"{'<=' if result.at_most else '>='} {result.target:,g}"
        verdict = {True: "met", False: "NOT met", None: ""}[result.met]
        lines.append(
            f"| {result.row} | {result.case} | {figure.strip()} | {spread} | {bound} "
            f"| {'; '.join(part for part in (verdict, result.note) if part)} |"
        )
    return "\n".join(lines)
