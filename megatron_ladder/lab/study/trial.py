"""One training of a study, and what came out of it.

A trial is a folder of its own: `checkpoints/` (with `run.jsonl`) while it runs, `output.txt`, and `result.json`, which
is written last and at once, so that a trial that has it is done.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megatron_ladder.errors import UserError

Kind = Literal["tuning", "tokens", "time", "adapt"]
"""Why a trial is run: to choose a learning rate, at equal tokens, at equal time, or to heal an adapted model."""
RESULT_NAME = "result.json"


@dataclass(frozen=True)
class StudiedWiring:
    """A wiring as a study names it."""

    name: str
    """In reports."""
    flags: tuple[str, ...]
    """For pretrain_ladder.py."""
    timed_as: str | None
    """Name of the same wiring in tools/benchmark.py; None if it is not timed."""
    ranks: int = 1
    """Fewest tensor-parallel processes that it has a meaning with."""


@dataclass(frozen=True)
class Trial:
    """One training."""

    kind: Kind
    wiring: str
    """`Wiring.name`."""
    size: str
    """Name of the model's shape."""
    seed: int
    """Of initial weights and order of samples: trials with the same one are paired."""
    learning_rate: float
    iterations: int
    detail: str = ""
    """What else tells it apart, such as `upper-4` and `3pct` of an adaptation."""

    @property
    def name(self) -> str:
        """Of its folder."""
        words = [self.kind, self.size, self.wiring, f"seed{self.seed}", f"lr{self.learning_rate:g}"]
        return "-".join([*words, f"it{self.iterations}", *filter(None, [self.detail])])


@dataclass(frozen=True)
class Result:
    """What a trial gave."""

    trial: Trial
    parameters: int
    """Of the model, all matrices counted."""
    tokens_per_step: int
    training: tuple[tuple[int, float], ...]
    """Iteration, and mean training loss of the steps since the one before it."""
    validation: tuple[tuple[int, float], ...]
    """Iteration and validation loss; the last one is of the finished model."""
    tokens_per_second: float
    """Median over the intervals of its log; on a machine that does other things besides, worth little."""
    seconds: float
    """Spent in its steps."""
    attempts: int
    """Starts it took: one more than its interruptions."""
    command: tuple[str, ...]
    versions: Mapping[str, str]
    """Of this software, torch and Python."""

    @property
    def final_loss(self) -> float:
        """Validation loss of the finished model, in nats a token."""
        return self.validation[-1][1]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the inverse of `from_dict`."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any], source: str) -> "Result":
        """Reads a stored result.

        Raises:
            UserError: it is not one of this version; `source` (the file) is named.
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
    """The result of a trial's folder, or None if it is not done.

    Raises:
        UserError: there is one that cannot be read.
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
