"""One training run of a study (a trial), and its result.

Each trial has a folder: `checkpoints/` (with `run.jsonl`) while it runs, `output.txt`, and `result.json`, which is
written last and atomically, so a trial that has it is done.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megatron_ladder.errors import UserError

Kind = Literal["tuning", "tokens", "time", "adapt"]
"""Purpose of a trial: choose a learning rate, compare at equal tokens or time, or heal an adapted model."""
RESULT_NAME = "result.json"


@dataclass(frozen=True)
class Trial:
    """One training run."""

    kind: Kind
    wiring: str
    """One of `wirings.ALL_WIRINGS`."""
    size: str
    """Name of the model's shape."""
    seed: int
    """Seed of initial weights and order of samples; trials with the same seed are paired."""
    learning_rate: float
    iterations: int
    detail: str = ""
    """Further distinction, such as `upper4-3pct-of-700` in an adaptation."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        words = [self.kind, self.size, self.wiring, f"seed{self.seed}", f"lr{self.learning_rate:g}"]
        return "-".join([*words, f"it{self.iterations}", *filter(None, [self.detail])])


@dataclass(frozen=True)
class Result:
    """The outcome of a trial."""

    trial: Trial
    parameters: int
    """Of the model, including all matrices."""
    tokens_per_step: int
    training: tuple[tuple[int, float], ...]
    """(iteration, mean training loss of the steps since the previous point)."""
    validation: tuple[tuple[int, float], ...]
    """(iteration, validation loss); the last point is the finished model."""
    tokens_per_second: float
    """Median over the intervals of its log; unreliable on a machine with other work."""
    seconds: float
    """Time in its steps."""
    attempts: int
    """Number of starts: interruptions plus one."""
    command: tuple[str, ...]
    versions: Mapping[str, str]
    """Of this software, torch and Python."""

    @property
    def final_loss(self) -> float:
        """Validation loss of the finished model, in nats per token."""
        return self.validation[-1][1]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dictionary; the inverse of `from_dict`."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any], source: str) -> "Result":
        """Parse a stored result.

        Raises:
            UserError: the values are not a result of this version; names the file `source`.
        """
        try:
            read = {field.name: values[field.name] for field in fields(Result)}
            read["trial"] = Trial(**read["trial"])
            read["training"], read["validation"] = (_curve(read[name]) for name in ("training", "validation"))
            read["command"] = tuple(read["command"])
            if not read["validation"]:
                raise ValueError("no validation loss")
            return Result(**read)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{source}: not a result of this version: {error!r}; remove it to run it again") from None


def read_result(folder: Path) -> Result | None:
    """Read the result in a trial's folder; None if the trial is not done.

    Raises:
        UserError: the result is invalid.
    """
    path = folder / RESULT_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}; remove it to run the trial again") from None
    return Result.from_dict(values, str(path))


def _curve(points: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(iteration), float(loss)) for iteration, loss in points)
