"""Results of trials in one JSON file that is continued after an interruption, and searches and intervals of them."""

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder_lab.study.grid import MOST_FURTHER, is_at_the_edge, value_beyond
from ladder_lab.study.statistics import Paired
from megatron_ladder.files import lock_file, write_atomically

Result = dict[str, Any]


class Results:
    """Results by the names of trials."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it exists; otherwise make its folder, which the first result would be too late for."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._lock = path, threading.Lock()
        self._found = self._read()

    def of(self, name: str) -> Result | None:
        """Return the result of a trial, or None if it has not ended."""
        return self._found.get(name)

    def add(self, name: str, result: Result) -> None:
        """Add a result to the file, which is replaced whole. Results that another process has added are kept."""
        with self._lock:
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                lock_file(folder, wait=True)
                self._found = {**self._read(), name: result}
                content = json.dumps(dict(sorted(self._found.items())), indent=1) + "\n"
                write_atomically(self._path, content)
            finally:
                os.close(folder)

    def _read(self) -> dict[str, Result]:
        found: dict[str, Result] = json.loads(self._path.read_text()) if self._path.exists() else {}
        return found


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
        return is_at_the_edge(self.best, self.losses)


def search(results: Results, grid: Sequence[float], name: Callable[[float], str]) -> Search:
    """Return the state of a search, from the results of the trials with these names."""

    def ended(values: Sequence[float]) -> dict[float, float]:
        found = {value: results.of(name(value)) for value in values}
        return {value: result["loss"] for value, result in found.items() if result is not None}

    values = sorted(grid)
    for _ in range(MOST_FURTHER):
        losses = ended(values)
        if len(losses) < len(values) or (further := value_beyond(losses)) is None:
            break
        values = sorted([*values, further])
    losses = ended(values)
    return Search(losses, tuple(value for value in values if value not in losses))


def interval(values: Sequence[float]) -> str:
    """Return the mean with its 95 % interval."""
    pairs = Paired(values)
    return f"{pairs.mean:+.4f} ± {pairs.half_width:.4f}" if pairs.pairs > 1 else f"{pairs.mean:+.4f}"
