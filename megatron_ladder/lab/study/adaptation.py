"""Adaptations: what a standard model becomes when its upper layers are rewired, and what a short training gives back.

Every seed's standard model is rewired at several numbers of upper layers. Its validation loss is taken as it is, and
after short trainings (healing) of several lengths, each a run of its own with its own schedule. The standard model
that stays what it is, trained on for as long, is the control: what the further training alone is worth.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_ladder.errors import UserError
from megatron_ladder.lab.study.statistics import Paired, deviation, paired
from megatron_ladder.lab.study.trial import Result, Trial

ADAPTATION_NAME = "adaptation.json"
CONTROL = 0
"""Rewired layers of the model that stays what it is."""
SEED_OFFSET = 1000
"""Healing's order of samples is another one than that of the training before it, of the same data. The seed draws the
validation samples too, so that all losses that are compared are taken with it."""


@dataclass(frozen=True)
class Adaptation:
    """What is adapted and how it is healed."""

    size: str
    """Name of the model's shape."""
    num_layers: int
    upper: tuple[int, ...]
    """Numbers of upper layers that are rewired, ascending; 0, the control, is the first."""
    percents: tuple[int, ...]
    """Lengths of healing, in percent of the tokens before it; ascending."""
    seeds: tuple[int, ...]
    standard_learning_rate: float
    """With which the standard models were trained; their checkpoints have the rest."""
    standard_iterations: int
    learning_rate: float
    """Highest of every healing, and alike for all: of the control too."""
    command: tuple[str, ...] = ()
    """That did it last."""

    def standard(self, seed: int) -> Trial:
        """The training that an adaptation begins with: that of the standard wiring at equal tokens."""
        return Trial("tokens", "standard", self.size, seed, self.standard_learning_rate, self.standard_iterations)

    def iterations(self, percent: int) -> int:
        """Steps of a healing; 0 of none."""
        return max(1, round(self.standard_iterations * percent / 100)) if percent else 0

    def trial(self, upper: int, percent: int, seed: int) -> Trial:
        """An adapted model, healed for so long; 0 percent is the evaluation right after the rewiring, or before any."""
        wiring = "standard" if upper == CONTROL else "ladder"
        detail = f"upper{upper}-{percent}pct-of-{self.standard_iterations}"
        rate = self.learning_rate if percent else self.standard_learning_rate
        return Trial("adapt", wiring, self.size, seed, rate, self.iterations(percent), detail)

    def trials(self) -> Iterator[tuple[int, int, Trial]]:
        """Upper layers, percent and trial of all. Longer ones come later, so that the first results come soon."""
        for percent in (0, *self.percents):
            for seed in self.seeds:
                for upper in self.upper:
                    yield upper, percent, self.trial(upper, percent, seed)

    def write(self, folder: Path) -> None:
        """Keeps it beside the study, so that the report knows what belongs together."""
        temporary = folder / f".{ADAPTATION_NAME}.tmp"
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        temporary.replace(folder / ADAPTATION_NAME)


def read_adaptation(folder: Path) -> Adaptation | None:
    """The adaptation of a study's folder, or None if there is none.

    Raises:
        UserError: the file cannot be read, or is not of this version.
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
    """None, a quarter, a half, three quarters and all of the layers."""
    return tuple(sorted({num_layers * quarters // 4 for quarters in range(5)}))


def adaptation_mistakes(num_layers: int, upper: Sequence[int], percents: Sequence[int]) -> list[str]:
    """A line for each number that cannot be."""
    mistakes = [
        f"--adapt-layers {layers}: expected numbers of upper layers, 1 to {num_layers}; 0 comes by itself"
        for layers in upper
        if not 0 <= layers <= num_layers
    ]
    return mistakes + [
        f"--healing-percent {percent}: expected whole percents of the training's tokens, 1 to 100"
        for percent in percents
        if not 1 <= percent <= 100
    ]


@dataclass(frozen=True)
class Adapted:
    """What an adaptation gave so far. Losses are validation losses in nats a token, by seed."""

    adaptation: Adaptation
    losses: Mapping[tuple[int, int], Mapping[int, float]]
    """(upper layers, percent) -> those of the adapted models; the control without healing is the standard model."""

    @staticmethod
    def of(adaptation: Adaptation, results: Mapping[Trial, Result]) -> "Adapted":
        """Picks what belongs to it from any results of a study."""
        losses: dict[tuple[int, int], dict[int, float]] = {
            (upper, percent): {} for percent in (0, *adaptation.percents) for upper in adaptation.upper
        }
        for upper, percent, trial in adaptation.trials():
            if trial in results:
                losses[upper, percent][trial.seed] = results[trial].final_loss
        return Adapted(adaptation, losses)

    @property
    def before(self) -> Mapping[int, float]:
        """Losses of the standard models, on the samples that adapted ones are validated on."""
        return self.losses[CONTROL, 0]

    @property
    def rewired(self) -> tuple[int, ...]:
        """Numbers of upper layers, without the control."""
        return tuple(upper for upper in self.adaptation.upper if upper != CONTROL)

    def to_control(self, upper: int, percent: int) -> Paired:
        """Loss less the control's of the same seed and length."""
        return paired(self.losses[upper, percent], self.losses[CONTROL, percent])

    def to_before(self, upper: int, percent: int) -> Paired:
        """Loss less that of the standard model it was made of."""
        return paired(self.losses[upper, percent], self.before)

    def is_back(self, difference: Paired, standard: Mapping[int, float]) -> bool | None:
        """Whether a mean difference is within the standard deviation of the standard model over seeds.

        None where a run is missing, or where fewer than two seeds leave no spread.
        """
        seeds = len(self.adaptation.seeds)
        if seeds < 2 or difference.pairs < seeds or len(standard) < seeds:
            return None
        return difference.mean <= deviation([*standard.values()])
