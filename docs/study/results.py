"""Results of trials in one JSON file that is continued after an interruption, and searches and intervals of them."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.files import write_atomically
from megatron_ladder.lab.study.statistics import Paired

Result = dict[str, Any]
MOST_FURTHER_VALUES = 3
"""Most values that a search tries beyond its grid."""


class Results:
    """Results by the names of trials."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it exists; otherwise make its folder, which the first result would be too late for."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._lock = path, threading.Lock()
        self._found: dict[str, Result] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, name: str) -> Result | None:
        """Return the result of a trial, or None if it has not ended."""
        return self._found.get(name)

    def add(self, name: str, result: Result) -> None:
        """Write a result; the file is replaced whole."""
        with self._lock:
            self._found[name] = result
            content = json.dumps(dict(sorted(self._found.items())), indent=1) + "\n"
            write_atomically(self._path, content)


@dataclass(frozen=True)
class Search:
    """The best of a few values, and of further ones while the best is at the edge."""

    losses: dict[float, float]
    """The loss of each value that was tried, in ascending order of the values."""
    missing: tuple[float, ...]
    """Values to try next; none at the end."""

    @property
    def best(self) -> float | None:
        """The value with the lowest loss; None before the end."""
        return None if self.missing else min(self.losses, key=lambda value: self.losses[value])

    @property
    def at_edge(self) -> bool:
        """Whether the best value is the lowest or highest that was tried."""
        return self.best in (min(self.losses), max(self.losses))


def search(results: Results, grid: Sequence[float], name: Callable[[float], str]) -> Search:
    """Return the state of a search, from the results of the trials with these names."""

    def ended(values: Sequence[float]) -> dict[float, float]:
        found = {value: results.of(name(value)) for value in values}
        return {value: result["loss"] for value, result in found.items() if result is not None}

    values, ratio = sorted(grid), grid[1] / grid[0]
    for _ in range(MOST_FURTHER_VALUES):
        losses = ended(values)
        if len(losses) < len(values):
            break
        lowest = min(values, key=lambda value: losses[value])
        if lowest not in (values[0], values[-1]):
            break
        values = sorted([*values, float(f"{lowest * ratio if lowest == values[-1] else lowest / ratio:.3g}")])
    losses = ended(values)
    return Search(losses, tuple(value for value in values if value not in losses))


def interval(values: Sequence[float]) -> str:
    """Return the mean with its 95 % interval."""
    pairs = Paired(values)
    return f"{pairs.mean:+.4f} ± {pairs.half_width:.4f}" if pairs.pairs > 1 else f"{pairs.mean:+.4f}"
