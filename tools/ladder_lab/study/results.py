"""The results of a study, grouped by their purpose; any of them can still be missing.

Time is counted in steps of the baseline under the interconnect: an iteration of a wiring takes 1 / speedup.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ladder_lab.study.grid import timed_iterations, tried_rates, untimed_wirings
from ladder_lab.study.schema import STUDY_NAME, TRIALS_NAME, Result, Study, Trial, read_result, read_study
from ladder_lab.study.statistics import CONFIDENCE, Paired, holm, paired
from ladder_lab.study.wirings import STANDARD
from megatron_ladder.errors import ErrorCollector, UserError

Budget = Literal["tokens", "time"]
"""The quantity that compared runs have in common."""
BUDGETS: tuple[Budget, Budget] = ("tokens", "time")
Curve = tuple[tuple[float, float], ...]
"""Tokens or time, ascending, and the validation loss in nats per token."""


@dataclass(frozen=True)
class Comparison:
    """A wiring compared with the baseline; p is adjusted for all comparisons of its table, NaN without an interval."""

    difference: Paired
    adjusted_p: float

    @property
    def holds_among_all(self) -> bool:
        """Whether the difference is significant among all comparisons of the table."""
        return self.adjusted_p <= 1 - CONFIDENCE


@dataclass(frozen=True)
class StudyResults:
    """A study with its finished trials in the order of their folders' names, without those of an adaptation."""

    study: Study
    finished: Mapping[Trial, Result]

    def tuning(self, size: str, wiring: str) -> dict[float, float]:
        """Map each learning rate to the final validation loss of its tuning run, ascending."""
        losses = {trial: result.final_loss for trial, result in self.finished.items()}
        return tried_rates(self.study, losses, size, wiring)

    def diverges_always(self, size: str, wiring: str) -> bool:
        """Return whether a wiring diverged at every learning rate, so that it is not trained further."""
        losses = self.tuning(size, wiring)
        return len(losses) >= len(self.study.learning_rates) > 0 and not any(map(math.isfinite, losses.values()))

    def runs(self, budget: Budget, size: str, wiring: str) -> dict[int, Result]:
        """Map each seed to a wiring's run. If equal time and equal tokens have the same length, both are one run.

        Runs with a learning rate or length that the study no longer has are ignored.
        """
        study, length = self.study, self.iterations(budget, size, wiring)
        rate = study.rate(size, wiring)
        if rate is None or length is None:
            return {}
        trial = Trial("tokens" if length == study.iterations else "time", wiring, size, 0, rate, length)
        found = {seed: self.finished.get(replace(trial, seed=seed)) for seed in study.seeds}
        return {seed: result for seed, result in found.items() if result is not None}

    def iterations(self, budget: Budget, size: str, wiring: str) -> int | None:
        """Return the length of a wiring's runs; None for a wiring that is not timed."""
        if budget == "tokens" or wiring == STANDARD:
            return self.study.iterations
        speedup = self.speedup(size, wiring)
        return None if speedup is None else timed_iterations(self.study, speedup)

    def final_losses(self, budget: Budget, size: str, wiring: str) -> dict[int, float]:
        """Map each seed to the validation loss of the finished model."""
        return {seed: one.final_loss for seed, one in self.runs(budget, size, wiring).items()}

    def wirings(self, budget: Budget) -> tuple[str, ...]:
        """Return the compared wirings, the baseline first."""
        named = self.study.wirings if budget == "tokens" else self.study.timed_wirings
        return (STANDARD, *(name for name in named if name != STANDARD))

    def speedup(self, size: str, wiring: str) -> float | None:
        """Return the baseline's step time over the wiring's; None before it is measured."""
        times = self.study.step_times.get(size)
        if times is None:
            return None
        return 1.0 if wiring == STANDARD else times.speedup.get(wiring)

    def comparisons(self, budget: Budget, size: str) -> dict[str, Comparison]:
        """Map every wiring but the baseline to its comparison, alone and adjusted for the whole table."""
        losses = {wiring: self.final_losses(budget, size, wiring) for wiring in self.wirings(budget)}
        baseline = losses.pop(STANDARD)
        found = {wiring: paired(by_seed, baseline) for wiring, by_seed in losses.items()}
        adjusted = holm({wiring: one.p for wiring, one in found.items()})
        return {wiring: Comparison(one, adjusted[wiring]) for wiring, one in found.items()}

    def curves(self, budget: Budget, size: str, wiring: str) -> dict[int, Curve]:
        """Map each seed to its curve over tokens, or over time in steps of the baseline; empty before it is timed."""
        speedup = self.speedup(size, wiring)
        if budget == "time" and speedup is None:
            return {}
        step = self.study.tokens_per_step if budget == "tokens" else 1 / (speedup or 1.0)
        return {
            seed: tuple((iteration * step, loss) for iteration, loss in one.validation)
            for seed, one in self.runs(budget, size, wiring).items()
        }

    def missing(self) -> list[str]:
        """Describe the trials that still have to run, one phrase per group."""
        study = self.study
        phrases: list[str] = []

        def add_phrase(group: str, expected: int, done: dict[str, int]) -> None:
            named = [f"{name} ({expected - count})" for name, count in done.items() if count < expected]
            phrases.extend([f"{group}: {', '.join(named)}"] if named else [])

        for size in study.sizes:
            if (rates := len(study.learning_rates)) > 1:
                done = {name: len(self.tuning(size, name)) for name in study.wirings}
                add_phrase(f"{size}, choosing a learning rate", rates, done)
            untimed = [name for name in untimed_wirings(study, size) if not self.diverges_always(size, name)]
            if untimed and len(self.wirings("time")) > 1:
                phrases.append(f"{size}: the step times of {', '.join(untimed)}")
            for budget in BUDGETS:
                # Standard is not trained again for equal time, and a wiring without a step time cannot be.
                done = {
                    name: len(self.runs(budget, size, name))
                    for name in self.wirings(budget)[budget == "time" :]
                    if not self.diverges_always(size, name)
                    and not (budget == "time" and size in study.step_times and self.speedup(size, name) is None)
                }
                add_phrase(f"{size}, equal {budget}", len(study.seeds), done)
        return phrases


def read_results(folder: Path) -> StudyResults:
    """Read a study's folder, finished or not. Raises UserError if it contains no study, or an invalid file."""
    study = read_study(folder)
    if study is None:
        raise UserError(f"{folder}: no {STUDY_NAME}; expected the folder of a study")
    finished: dict[Trial, Result] = {}
    errors = ErrorCollector()
    for trial in sorted((folder / TRIALS_NAME).glob("*/")):
        with errors.collect():
            result = read_result(trial)
            # An adaptation has a separate report.
            if result is not None and result.trial.kind != "adapt":
                finished[result.trial] = result
    errors.raise_if_any()
    return StudyResults(study, finished)
