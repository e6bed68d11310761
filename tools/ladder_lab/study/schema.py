"""The JSON files of a study: `study.json`, which describes it, and the `result.json` of each run (trial).

The result is written last and atomically, so a trial that has it is done.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatron_ladder.errors import UserError, raise_user_errors
from megatron_ladder.files import write_atomically

STUDY_NAME = "study.json"
TRIALS_NAME = "trials"
CHECKPOINTS = "checkpoints"
"""Directory of checkpoints in the folder of a trial."""
RESULT_NAME = "result.json"
_CHANGEABLE_FIELDS = ("machine", "command", "chosen", "step_times")
"""Fields of a study on which no result depends, or that are derived from results."""
_EXTENSIBLE_FIELDS = ("wirings", "timed_wirings", "seeds")
"""Fields to which a later start can add values, because a trial depends on none but its own."""

Kind = Literal["tuning", "tokens", "time", "adapt"]
"""Purpose of a trial: choose a learning rate, compare at equal tokens or time, or heal an adapted model."""
Stored = TypeVar("Stored")


@dataclass(frozen=True)
class StepTimes:
    """Medians of a step's seconds, and of its paired speedup over standard with the interquartile range, by wiring.

    Wirings that were added to a study later are measured by `later_commands`.
    """

    interconnect: str
    ranks: int
    seconds: Mapping[str, float]
    speedup: Mapping[str, float]
    spread: Mapping[str, float]
    command: tuple[str, ...]
    later_commands: tuple[tuple[str, ...], ...] = ()

    def extended_by(self, later: "StepTimes") -> "StepTimes":
        """Return these times and those of further wirings; a wiring that is already measured keeps its times."""
        added = ", ".join(name for name in later.speedup if name not in self.speedup)
        return StepTimes(
            interconnect=f"{self.interconnect}; for {added}: {later.interconnect}",
            ranks=self.ranks,
            seconds={**later.seconds, **self.seconds},
            speedup={**later.speedup, **self.speedup},
            spread={**later.spread, **self.spread},
            command=self.command,
            later_commands=(*self.later_commands, later.command),
        )


@dataclass(frozen=True)
class Study:
    """A grid of training runs, with the settings of `RunOptions` on which results depend.

    `sizes` maps names to the fields of the model's shape, and `schedule` has the shares `warm_up` (of iterations) and
    `last` (of the rate). `chosen` maps `size/wiring` to the chosen learning rate, and `step_times` the timed sizes.
    """

    wirings: tuple[str, ...]
    timed_wirings: tuple[str, ...]
    sizes: Mapping[str, Mapping[str, int]]
    seeds: tuple[int, ...]
    tuning_seed: int
    learning_rates: tuple[float, ...]
    iterations: int
    tuning_iterations: int
    tokens_per_step: int
    seq_length: int
    link: str
    training_flags: tuple[str, ...]
    data: str
    schedule: Mapping[str, float]
    machine: Mapping[str, str]
    command: tuple[str, ...]
    chosen: Mapping[str, float] = field(default_factory=dict)
    step_times: Mapping[str, StepTimes] = field(default_factory=dict)

    @property
    def models(self) -> list[tuple[str, str]]:
        """Size and wiring of every compared model."""
        return [(size, wiring) for size in self.sizes for wiring in self.wirings]

    def rate(self, size: str, wiring: str) -> float | None:
        """Return the chosen learning rate; None before it is chosen."""
        return self.chosen.get(rate_key(size, wiring))


def rate_key(size: str, wiring: str) -> str:
    """Return the key of `Study.chosen`."""
    return f"{size}/{wiring}"


@dataclass(frozen=True)
class Trial:
    """One training run; in an adaptation, `detail` is a further distinction such as `upper4-3pct-of-700`."""

    kind: Kind
    wiring: str
    size: str
    seed: int
    learning_rate: float
    iterations: int
    detail: str = ""

    @property
    def name(self) -> str:
        """Name of its folder."""
        words = [self.kind, self.size, self.wiring, f"seed{self.seed}", f"lr{self.learning_rate:g}"]
        return "-".join([*words, f"it{self.iterations}", *filter(None, [self.detail])])


@dataclass(frozen=True)
class Result:
    """The outcome of a trial: curves of (iteration, loss in nats per token), and the seconds of its steps."""

    trial: Trial
    parameters: int
    tokens_per_step: int
    training: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]
    tokens_per_second: float
    seconds: float
    attempts: int
    command: tuple[str, ...]
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        if not self.validation:
            raise ValueError("no validation loss")

    @property
    def final_loss(self) -> float:
        """Validation loss of the finished model."""
        return self.validation[-1][1]


def read_json(path: Path, kind: type[Stored], name: str, fix: str, **decoders: Callable[[Any], Any]) -> Stored | None:
    """Read a dataclass that is stored as JSON, with decoders of fields; None if there is no such file.

    Lists become tuples. Raises a UserError with `name` and `fix` for an invalid file, or one from another version.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        read = {one.name: values[one.name] for one in fields(kind)}  # type: ignore[arg-type]
        for field_name, value in read.items():
            decode = decoders.get(field_name, tuple if isinstance(value, list) else lambda value: value)
            read[field_name] = decode(value)
        return kind(**read)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not {name} of this version: {error!r}; {fix}") from None


def write_json(path: Path, stored: Any) -> None:
    """Store a dataclass as JSON, atomically. Losses that are not finite become text, which JSON has no numbers for."""
    values = asdict(stored)
    for curve in {"training", "validation"} & values.keys():
        values[curve] = [[step, loss if math.isfinite(loss) else "inf"] for step, loss in values[curve]]
    write_atomically(path, json.dumps(values, indent=1, allow_nan=False) + "\n")


def read_result(folder: Path) -> Result | None:
    """Read the result in a trial's folder; None if the trial is not done. Raises UserError if it is invalid."""

    def decode_curve(points: Any) -> tuple[tuple[int, float], ...]:
        return tuple((int(iteration), float(loss)) for iteration, loss in points)

    decoders = {"trial": lambda values: Trial(**values), "training": decode_curve, "validation": decode_curve}
    return read_json(folder / RESULT_NAME, Result, "a result", "remove it to run the trial again", **decoders)


def read_study(folder: Path) -> Study | None:
    """Read the study of a folder; None if there is none. Raises UserError if it is invalid."""

    def decode_times(sizes: Any) -> dict[str, StepTimes]:
        return {size: decode_one(**times) for size, times in sizes.items()}

    def decode_one(command: Any, later_commands: Any = (), **times: Any) -> StepTimes:
        return StepTimes(**times, command=tuple(command), later_commands=tuple(map(tuple, later_commands)))

    return read_json(folder / STUDY_NAME, Study, "a study", "give another --output-dir", step_times=decode_times)


def write_study(folder: Path, study: Study) -> None:
    """Replace the description of a folder's study atomically."""
    write_json(folder / STUDY_NAME, study)


def changed_fields(before: Study, now: Study) -> list[str]:
    """Return the fields that differ, without those on which no result depends and those that were only extended."""
    names = (one.name for one in fields(Study) if one.name not in _CHANGEABLE_FIELDS)
    changed = [name for name in names if getattr(before, name) != getattr(now, name)]
    # Without rates to try, the chosen ones are a setting.
    if not before.learning_rates and not before.chosen.items() <= now.chosen.items():
        changed.append("chosen")
    return [name for name in changed if name not in _EXTENSIBLE_FIELDS or not _extends(before, now, name)]


def _extends(before: Study, now: Study, name: str) -> bool:
    return {*getattr(before, name)} <= {*getattr(now, name)}


def load_or_create_study(folder: Path, requested: Study, check: Callable[[Study], None] = lambda study: None) -> Study:
    """Return the study of a folder, extended as requested, or write the requested one.

    `check` can reject an extended study with a UserError before it is written. Raises UserError if other settings
    differ, or if the request lacks wirings or seeds of the study.
    """
    found = read_study(folder)
    if found is None:
        write_study(folder, requested)
        return requested
    raise_user_errors(
        f"{folder / STUDY_NAME}: {name.replace('_', ' ')}: was {json.dumps(getattr(found, name))}, now "
        f"{json.dumps(getattr(requested, name))}: give another --output-dir, or the same settings"
        + " and further ones"
        * (name in _EXTENSIBLE_FIELDS)
        for name in changed_fields(found, requested)
    )
    extended = {name: getattr(requested, name) for name in _EXTENSIBLE_FIELDS}
    if extended == {name: getattr(found, name) for name in extended}:
        return found
    # Trials were trained with the rates chosen before.
    chosen = {**requested.chosen, **found.chosen}
    study = replace(found, **extended, chosen=chosen, command=requested.command)
    check(study)
    write_study(folder, study)
    return study
