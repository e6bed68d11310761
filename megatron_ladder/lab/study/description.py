"""The description of a study: the file `study.json` next to its trials, from which its report is written.

It is written before the first trial, and again when learning rates are chosen and steps are timed. Resuming a study
with different settings is rejected.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_ladder.errors import UserError, raise_user_errors
from megatron_ladder.files import write_atomically

STUDY_NAME = "study.json"
TRIALS_NAME = "trials"
CHANGEABLE_FIELDS = ("machine", "command", "chosen", "step_times")
"""Fields on which no result depends, or that are derived from results."""


@dataclass(frozen=True)
class StepTimes:
    """Times of a training step under one interconnect, with the wirings interleaved in every round."""

    interconnect: str
    """Description: whose interconnect, or how long an all-reduce takes on the emulated one."""
    ranks: int
    """Tensor-parallel processes."""
    seconds: Mapping[str, float]
    """Wiring -> median of a step's forward and backward."""
    speedup: Mapping[str, float]
    """Wiring -> median of the rounds' paired ratios, standard over this wiring; 1 for standard."""
    spread: Mapping[str, float]
    """Wiring -> interquartile range of the ratio."""
    command: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """A grid of training runs."""

    wirings: tuple[str, ...]
    timed_wirings: tuple[str, ...]
    """Wirings that are also trained for the time that standard takes."""
    sizes: Mapping[str, Mapping[str, int]]
    """Name -> num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_key_value_heads."""
    seeds: tuple[int, ...]
    tuning_seed: int
    learning_rates: tuple[float, ...]
    """Tried for every wiring and size."""
    iterations: int
    """Of standard, and of every wiring at equal tokens."""
    tuning_iterations: int
    tokens_per_step: int
    seq_length: int
    link: str
    """As on the command line."""
    training_flags: tuple[str, ...]
    """Passed to every trial."""
    data: str
    """Description of the training data, with its number of tokens."""
    machine: Mapping[str, str]
    """Processor, cores, and versions of the libraries that compute."""
    command: tuple[str, ...]
    chosen: Mapping[str, float] = field(default_factory=dict)
    """`size/wiring` -> learning rate, after it is chosen."""
    step_times: Mapping[str, StepTimes] = field(default_factory=dict)
    """Size -> times, after they are measured."""
    schedule: Mapping[str, float] = field(default_factory=dict)
    """`warm_up`: share of a trial's iterations; `last`: its lowest learning rate as a share of the highest."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dictionary; the inverse of `read_study`."""
        return asdict(self)


def read_study(folder: Path) -> Study | None:
    """Read the study of a folder; None if there is none.

    Raises:
        UserError: the file is invalid, or from another version.
    """
    path = folder / STUDY_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        read = {one.name: values[one.name] for one in fields(Study)}
        for name, value in read.items():
            if isinstance(value, list):
                read[name] = tuple(value)
        read["step_times"] = {
            size: StepTimes(**{**times, "command": tuple(times["command"])})
            for size, times in read["step_times"].items()
        }
        return Study(**read)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a study of this version: {error!r}") from None


def write_study(folder: Path, study: Study) -> None:
    """Replace the description atomically."""
    write_atomically(folder / STUDY_NAME, json.dumps(study.to_dict(), indent=1) + "\n")


def load_or_create_study(folder: Path, requested: Study) -> Study:
    """Return the study of a folder, after checking that it is the requested one; write the requested one if none.

    Raises:
        UserError: the folder has a study with other settings; one message per difference.
    """
    found = read_study(folder)
    if found is None:
        write_study(folder, requested)
        return requested
    before, now = (json.loads(json.dumps(study.to_dict())) for study in (found, requested))
    raise_user_errors(
        f"{folder / STUDY_NAME}: {name.replace('_', ' ')}: was {json.dumps(before[name])}, now "
        f"{json.dumps(now[name])}: give another --output-dir, or the same settings"
        for name in before
        if name not in CHANGEABLE_FIELDS and before[name] != now[name]
    )
    return found
