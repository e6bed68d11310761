"""Adaptation: rewires the upper layers of standard models, and trains them for a short time (healing).

Every seed's standard model is rewired at several numbers of upper layers. Its validation loss is measured right after
rewiring, and after healing runs of several lengths, each with a separate schedule. The control is the standard model
itself, trained for as long: it shows the effect of the additional training alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.lab.study.schema import Result, Trial, read_json
from megatron_ladder.lab.study.statistics import Paired, paired
from megatron_ladder.lab.study.wirings import STANDARD

ADAPTATION_NAME = "adaptation.json"
CONTROL = 0
"""Number of rewired layers of the control, which stays standard."""
SEED_OFFSET = 1000
"""Added to the seeds of adapted models, so that healing sees the data in another order. The seed also draws the
validation samples, so all compared losses use it."""


@dataclass(frozen=True)
class Adaptation:
    """The models to adapt, and how they are healed."""

    size: str
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
        return Trial("tokens", STANDARD, self.size, seed, self.standard_learning_rate, self.standard_iterations)

    def iterations(self, percent: int) -> int:
        """Return the steps of a healing run; 0 without healing."""
        return max(1, round(self.standard_iterations * percent / 100)) if percent else 0

    def trial(self, upper: int, percent: int, seed: int) -> Trial:
        """Return the trial that heals an adapted model; with 0 percent, it is evaluated right after rewiring."""
        wiring = STANDARD if upper == CONTROL else "ladder"
        detail = f"upper{upper}-{percent}pct-of-{self.standard_iterations}"
        rate = self.learning_rate if percent else self.standard_learning_rate
        return Trial("adapt", wiring, self.size, seed, rate, self.iterations(percent), detail)

    def trials(self) -> Iterator[tuple[int, int, Trial]]:
        """Yield upper layers, percent and trial of all; short trials first, so that results come early."""
        for percent in (0, *self.percents):
            for seed in self.seeds:
                for upper in self.upper:
                    yield upper, percent, self.trial(upper, percent, seed)

    @property
    def rewired(self) -> tuple[int, ...]:
        """Numbers of rewired upper layers, without the control."""
        return tuple(upper for upper in self.upper if upper != CONTROL)


def read_adaptation(folder: Path) -> Adaptation | None:
    """Read the adaptation of a study's folder; None if there is none.

    Raises:
        UserError: the file is invalid, or from another version.
    """
    return read_json(folder / ADAPTATION_NAME, Adaptation, "an adaptation", "remove it")


def default_upper(num_layers: int) -> tuple[int, ...]:
    """Return 0, a quarter, a half, three quarters and all of the layers."""
    return tuple(sorted({num_layers * quarters // 4 for quarters in range(5)}))


@dataclass(frozen=True)
class AdaptationResults:
    """An adaptation with its finished trials."""

    plan: Adaptation
    finished: Mapping[Trial, Result]

    def losses(self, upper: int, percent: int) -> dict[int, float]:
        """Map each seed to the validation loss of an adapted model, in nats per token."""
        trials = {seed: self.plan.trial(upper, percent, seed) for seed in self.plan.seeds}
        return {seed: self.finished[trial].final_loss for seed, trial in trials.items() if trial in self.finished}

    @property
    def before(self) -> dict[int, float]:
        """Losses of the standard models, on the validation samples of the adapted ones."""
        return self.losses(CONTROL, 0)

    def to_control(self, upper: int, percent: int) -> Paired:
        """Return the losses less the control's of the same seed and length."""
        return paired(self.losses(upper, percent), self.losses(CONTROL, percent))

    def to_before(self, upper: int, percent: int) -> Paired:
        """Return the losses less those of the original standard models."""
        return paired(self.losses(upper, percent), self.before)
