"""The table of the data benchmark. A row is a function from a DataBenchmark to results."""

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DataBenchmark:
    """Settings for a row."""

    folder: Path
    """An existing directory for the files of the row, which is deleted afterwards."""
    rounds: int
    """Measured rounds of the compared variants."""
    megabytes: int
    """Size of the text to tokenize, unless a row has its own size."""
    report: Callable[[str], None]
    """Receives progress messages."""


@dataclass(frozen=True)
class DataResult:
    """A measured value and its target."""

    row: str
    """Name of the row on the command line."""
    case: str
    """Description of the measured case."""
    figure: float | None
    """The measured value; None if it could not be measured, for the reason in `note`."""
    unit: str
    """Unit of the value."""
    target: float | None
    """The target, or None."""
    at_most: bool = False
    """Whether the target is an upper bound."""
    spread: float | None = None
    """Interquartile range over the rounds."""
    note: str = ""
    """Further information."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if unknown."""
        if self.figure is None or self.target is None:
            return None
        return self.figure <= self.target if self.at_most else self.figure >= self.target


DataRow = Callable[[DataBenchmark], Sequence[DataResult]]
"""Measures, and returns one line of the table per case."""


def cpu_seconds() -> float:
    """Return the user and system time of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def table(results: Sequence[DataResult]) -> str:
    """Return the results as a table in Markdown."""
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
