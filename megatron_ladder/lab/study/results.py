"""The results of a study, grouped by their purpose; any of them can still be missing.

A curve is a tuple of (position, validation loss in nats per token), ascending. Positions are iterations, tokens, or
time. Time is counted in steps of the baseline under the interconnect: an iteration of a wiring takes 1 / speedup.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.errors import ErrorCollector, UserError
from megatron_ladder.lab.study.description import STUDY_NAME, TRIALS_NAME, Study, read_study
from megatron_ladder.lab.study.grid import rate_key, timed_iterations
from megatron_ladder.lab.study.statistics import CONFIDENCE, Paired, holm, paired
from megatron_ladder.lab.study.trial import Kind, Result, read_result
from megatron_ladder.lab.study.wirings import STANDARD

Budget = Literal["tokens", "time"]
"""The quantity that compared runs have in common."""
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class StudyResults:
    """A study with its finished trials."""

    study: Study
    finished: tuple[Result, ...]
    """Results in the order of their folders' names, without those of an adaptation."""

    def tuning(self, size: str, wiring: str) -> dict[float, float]:
        """Map each learning rate to the final validation loss of its tuning run, ascending."""
        asked = (self.study.tuning_seed, self.study.tuning_iterations)
        found = [one for one in self._of("tuning", size, wiring) if (one.trial.seed, one.trial.iterations) == asked]
        return dict(sorted((one.trial.learning_rate, one.final_loss) for one in found))

    def runs(self, budget: Budget, size: str, wiring: str) -> dict[int, Result]:
        """Map each seed to a wiring's run. If equal time and equal tokens have the same length, both are one run.

        Runs with a learning rate or length that the study no longer has are ignored.
        """
        length = self.iterations(budget, size, wiring)
        kind: Kind = "tokens" if length == self.study.iterations else "time"
        asked = (self.study.chosen.get(rate_key(size, wiring)), length)
        found = {
            one.trial.seed: one
            for one in self._of(kind, size, wiring)
            if (one.trial.learning_rate, one.trial.iterations) == asked
        }
        return {seed: found[seed] for seed in self.study.seeds if seed in found}

    def iterations(self, budget: Budget, size: str, wiring: str) -> int | None:
        """Return the length of a wiring's runs; None for a wiring that is not timed."""
        if budget == "tokens" or wiring == STANDARD:
            return self.study.iterations
        speedup = self.speedup(size, wiring)
        return None if speedup is None else timed_iterations(self.study.iterations, speedup)

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

    def comparisons(self, budget: Budget, size: str) -> "dict[str, Comparison]":
        """Map every wiring but the baseline to its comparison, alone and adjusted for the whole table."""
        baseline = self.final_losses(budget, size, STANDARD)
        found = {
            wiring: paired(self.final_losses(budget, size, wiring), baseline) for wiring in self.wirings(budget)[1:]
        }
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
        study, phrases = self.study, []
        for size in study.sizes:
            if len(study.learning_rates) > 1:
                short = {name: len(study.learning_rates) - len(self.tuning(size, name)) for name in study.wirings}
                phrases += _phrases(f"{size}, choosing a learning rate", short)
            if size not in study.step_times and len(self.wirings("time")) > 1:
                phrases.append(f"{size}: the step times")
            possible = [name for name in self.wirings("tokens") if not self.diverges_always(size, name)]
            timed = [name for name in self.wirings("time")[1:] if name in possible]
            if size in study.step_times:
                timed = [name for name in timed if self.speedup(size, name) is not None]
            short = {name: len(study.seeds) - len(self.runs("tokens", size, name)) for name in possible}
            phrases += _phrases(f"{size}, equal tokens", short)
            short = {name: len(study.seeds) - len(self.runs("time", size, name)) for name in timed}
            phrases += _phrases(f"{size}, equal time", short)
        return phrases

    def diverges_always(self, size: str, wiring: str) -> bool:
        """Return whether a wiring diverged at every learning rate, so that it is not trained further."""
        losses = self.tuning(size, wiring)
        return len(losses) >= len(self.study.learning_rates) > 0 and not any(map(math.isfinite, losses.values()))

    def _of(self, kind: Kind, size: str, wiring: str) -> list[Result]:
        wanted = (kind, size, wiring)
        return [one for one in self.finished if (one.trial.kind, one.trial.size, one.trial.wiring) == wanted]


@dataclass(frozen=True)
class Comparison:
    """A wiring compared with the baseline."""

    difference: Paired
    adjusted_p: float
    """By Holm's correction, among all comparisons of its table; NaN without an interval."""

    @property
    def holds_among_all(self) -> bool:
        """Whether the difference is significant among all comparisons of the table."""
        return self.adjusted_p <= 1 - CONFIDENCE


def read_results(folder: Path) -> StudyResults:
    """Read a study's folder, finished or not.

    Raises:
        UserError: the folder contains no study, or an invalid file.
    """
    study = read_study(folder)
    if study is None:
        raise UserError(f"{folder}: no {STUDY_NAME}; expected the folder of a study")
    trials = folder / TRIALS_NAME
    folders = sorted(path for path in trials.iterdir() if path.is_dir()) if trials.is_dir() else []
    results: list[Result] = []
    errors = ErrorCollector()
    for trial in folders:
        with errors.collect():
            result = read_result(trial)
            # An adaptation has a separate report.
            results += [] if result is None or result.trial.kind == "adapt" else [result]
    errors.raise_if_any()
    return StudyResults(study, tuple(results))


def _phrases(what: str, short: Mapping[str, int]) -> list[str]:
    named: Sequence[str] = [f"{name} ({count})" for name, count in short.items() if count > 0]
    return [f"{what}: {', '.join(named)}"] if named else []
