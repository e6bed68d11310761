"""What a study is: the file `study.json` beside its trials, from which its report is written.

It is written before the first trial, and again when learning rates are chosen and steps are timed. A study that is
resumed compares it with its command line and refuses another one.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_ladder.errors import UserError

STUDY_NAME = "study.json"
TRIALS_NAME = "trials"


@dataclass(frozen=True)
class StepTimes:
    """What a training step takes, wirings interleaved in every round, under one interconnect."""

    interconnect: str
    """Stated in words: whose it is, or how long an all-reduce takes on the emulated one."""
    ranks: int
    """Tensor-parallel processes."""
    seconds: Mapping[str, float]
    """Wiring -> median of a step's forward and backward."""
    speedup: Mapping[str, float]
    """Wiring -> median of the rounds' paired ratios, standard over this wiring; 1 for standard."""
    spread: Mapping[str, float]
    """Wiring -> distance of the ratio's quartiles."""
    command: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """A grid of trainings."""

    wirings: tuple[str, ...]
    timed_wirings: tuple[str, ...]
    """Those that are also trained for the time that standard takes."""
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
    """Given to every trial."""
    data: str
    """What is trained on, in words, with its number of tokens."""
    machine: Mapping[str, str]
    """Processor, cores, and versions of what computes."""
    command: tuple[str, ...]
    chosen: Mapping[str, float] = field(default_factory=dict)
    """`size/wiring` -> learning rate, once it is chosen."""
    step_times: Mapping[str, StepTimes] = field(default_factory=dict)
    """Size -> times, once they are measured."""
    schedule: Mapping[str, float] = field(default_factory=dict)
    """`warm_up`: share of a trial's iterations; `last`: its lowest learning rate as a share of the highest."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the inverse of `read_study`."""
        return asdict(self)


def read_study(folder: Path) -> Study | None:
    """The study of a folder, or None if there is none.

    Raises:
        UserError: the file cannot be read, or is not of this version.
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
