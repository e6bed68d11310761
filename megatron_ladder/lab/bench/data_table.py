"""The table of the data benchmark. A row is a function from a DataBenchmark to results."""

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DataBenchmark:
    """Settings for a row: a folder for its files (deleted afterwards), measured rounds, and size of the text in MB."""

    folder: Path
    rounds: int
    megabytes: int
    report: Callable[[str], None]


@dataclass(frozen=True)
class DataResult:
    """A measured value of a case of a row, and its target, which is a lower bound unless `at_most`.

    The figure is None if it could not be measured (see `note`). The spread is the rounds' interquartile range.
    """

    row: str
    case: str
    figure: float | None
    unit: str
    target: float | None
    at_most: bool = False
    spread: float | None = None
    note: str = ""

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
        figure = "-"
        if result.figure is not None:
            figure = f"{result.figure:,.{'0f' if result.figure >= 1000 else '3g'}} {result.unit}"
        spread = "" if result.spread is None else f"{result.spread:.2g}"
        bound = "" if result.target is None else f"{'<=' if result.at_most else '>='} {result.target:,g}"
        verdict = {True: "met", False: "NOT met", None: ""}[result.met]
        lines.append(
            f"| {result.row} | {result.case} | {figure.strip()} | {spread} | {bound} "
            f"| {'; '.join(part for part in (verdict, result.note) if part)} |"
        )
    return "\n".join(lines)
