"""Adaptation: rewires the upper layers of standard models, and trains them for a short time (healing).

Every seed's standard model is rewired at several numbers of upper layers. Its validation loss is measured right after
rewiring, and after healing runs of several lengths, each with a separate schedule. The control is the standard model
itself, trained for as long: it shows the effect of the additional training alone.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_ladder.errors import UserError
from megatron_ladder.files import write_atomically
from megatron_ladder.lab.study.statistics import Paired, deviation, paired
from megatron_ladder.lab.study.trial import Result, Trial

ADAPTATION_NAME = "adaptation.json"
CONTROL = 0
"""Number of rewired layers of the control, which stays standard."""
SEED_OFFSET = 1000
"""Added to the seed for healing, which therefore sees the same data in another order. The seed also draws the
validation samples, so all compared losses use it."""


@dataclass(frozen=True)
class Adaptation:
    """The models to adapt, and how they are healed."""

    size: str
    """Name of the model's shape."""
    num_layers: int
    upper: tuple[int, ...]
    """Numbers of rewired upper layers, ascending; the first is 0, the control."""
    percents: tuple[int, ...]
    """Lengths of healing in percent of the original training, ascending."""
    seeds: tuple[int, ...]
    standard_learning_rate: float
    """Of the training of the standard models."""
    standard_iterations: int
    learning_rate: float
    """Highest learning rate of every healing run, including the control's."""
    command: tuple[str, ...] = ()
    """Of the last start."""

    def standard(self, seed: int) -> Trial:
        """Return the trial that trains the standard model: the one at equal tokens."""
        return Trial("tokens", "standard", self.size, seed, self.standard_learning_rate, self.standard_iterations)

    def iterations(self, percent: int) -> int:
        """Return the steps of a healing run; 0 without healing."""
        return max(1, round(self.standard_iterations * percent / 100)) if percent else 0

    def trial(self, upper: int, percent: int, seed: int) -> Trial:
        """Return the trial that heals an adapted model; with 0 percent, it is evaluated right after rewiring."""
        wiring = "standard" if upper == CONTROL else "ladder"
        detail = f"upper{upper}-{percent}pct-of-{self.standard_iterations}"
        rate = self.learning_rate if percent else self.standard_learning_rate
        return Trial("adapt", wiring, self.size, seed, rate, self.iterations(percent), detail)

    def trials(self) -> Iterator[tuple[int, int, Trial]]:
        """Yield upper layers, percent and trial of all; short trials first, so that results come early."""
        for percent in (0, *self.percents):
            for seed in self.seeds:
                for upper in self.upper:
                    yield upper, percent, self.trial(upper, percent, seed)

    def write(self, folder: Path) -> None:
        """Write it next to the study, for the report."""
        write_atomically(folder / ADAPTATION_NAME, json.dumps(asdict(self), indent=1) + "\n")


def read_adaptation(folder: Path) -> Adaptation | None:
    """Read the adaptation of a study's folder; None if there is none.

    Raises:
        UserError: the file is invalid, or from another version.
    """
    path = folder / ADAPTATION_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        read: dict[str, Any] = {one.name: values[one.name] for one in fields(Adaptation)}
        for name, value in read.items():
            if isinstance(value, list):
                read[name] = tuple(value)
        return Adaptation(**read)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not an adaptation of this version: {error!r}; remove it") from None


def default_upper(num_layers: int) -> tuple[int, ...]:
    """Return 0, a quarter, a half, three quarters and all of the layers."""
    return tuple(sorted({num_layers * quarters // 4 for quarters in range(5)}))


@dataclass(frozen=True)
class AdaptationResults:
    """Results of an adaptation so far. Losses are validation losses in nats per token, by seed."""

    adaptation: Adaptation
    losses: Mapping[tuple[int, int], Mapping[int, float]]
    """(upper layers, percent) -> losses by seed; the control without healing is the standard model."""

    @staticmethod
    def of(adaptation: Adaptation, results: Mapping[Trial, Result]) -> "AdaptationResults":
        """Select the results of an adaptation from those of a study."""
        losses: dict[tuple[int, int], dict[int, float]] = {
            (upper, percent): {} for percent in (0, *adaptation.percents) for upper in adaptation.upper
        }
        for upper, percent, trial in adaptation.trials():
            if trial in results:
                losses[upper, percent][trial.seed] = results[trial].final_loss
        return AdaptationResults(adaptation, losses)

    @property
    def before(self) -> Mapping[int, float]:
        """Losses of the standard models, on the validation samples of the adapted ones."""
        return self.losses[CONTROL, 0]

    @property
    def rewired(self) -> tuple[int, ...]:
        """Numbers of rewired upper layers, without the control."""
        return tuple(upper for upper in self.adaptation.upper if upper != CONTROL)

    def to_control(self, upper: int, percent: int) -> Paired:
        """Return the losses less the control's of the same seed and length."""
        return paired(self.losses[upper, percent], self.losses[CONTROL, percent])

    def to_before(self, upper: int, percent: int) -> Paired:
        """Return the losses less those of the original standard models."""
        return paired(self.losses[upper, percent], self.before)

    def is_back(self, difference: Paired, standard: Mapping[int, float]) -> bool | None:
        """Return whether a mean difference is within the standard deviation of the standard model over seeds.

        None if a run is missing, or with fewer than two seeds.
        """
        seeds = len(self.adaptation.seeds)
        if seeds < 2 or difference.pairs < seeds or len(standard) < seeds:
            return None
        return difference.mean <= deviation([*standard.values()])
