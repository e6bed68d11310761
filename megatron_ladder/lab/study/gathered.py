"""The results of a study, found by what they are for; any of them may not be there yet.

A curve is a tuple of (position, validation loss in nats a token), ascending; its position is in iterations, in tokens,
or in time. Time is counted in steps of the baseline under the interconnect: an iteration of a wiring takes 1 / speedup.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ladder.errors import UserError
from megatron_ladder.lab.study.description import STUDY_NAME, TRIALS_NAME, Study, read_study
from megatron_ladder.lab.study.grid import key_of, timed_iterations
from megatron_ladder.lab.study.statistics import CONFIDENCE, Paired, holm, paired
from megatron_ladder.lab.study.trial import Kind, Result, read_result
from megatron_ladder.lab.study.wirings import STANDARD

Terms = Literal["tokens", "time"]
"""At equal what runs are compared."""
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Gathered:
    """A study with what is done of it."""

    study: Study
    results: tuple[Result, ...]
    """But for an adaptation's; in the order of their folders' names."""

    def tuning(self, size: str, wiring: str) -> dict[float, float]:
        """Learning rate -> final validation loss of its short run, ascending."""
        asked = (self.study.tuning_seed, self.study.tuning_iterations)
        found = [one for one in self._of("tuning", size, wiring) if (one.trial.seed, one.trial.iterations) == asked]
        return dict(sorted((one.trial.learning_rate, one.final_loss) for one in found))

    def runs(self, terms: Terms, size: str, wiring: str) -> dict[int, Result]:
        """Seed -> run of a wiring. One at equal time that is as long as at equal tokens is that run.

        A folder may hold runs with a learning rate or a length of before; those that the study now asks for count.
        """
        length = self.iterations(terms, size, wiring)
        kind: Kind = "tokens" if length == self.study.iterations else "time"
        asked = (self.study.chosen.get(key_of(size, wiring)), length)
        found = {
            one.trial.seed: one
            for one in self._of(kind, size, wiring)
            if (one.trial.learning_rate, one.trial.iterations) == asked
        }
        return {seed: found[seed] for seed in self.study.seeds if seed in found}

    def iterations(self, terms: Terms, size: str, wiring: str) -> int | None:
        """Of each run of a wiring; None for a wiring that is not timed."""
        if terms == "tokens" or wiring == STANDARD:
            return self.study.iterations
        speedup = self.speedup(size, wiring)
        return None if speedup is None else timed_iterations(self.study.iterations, speedup)

    def final_losses(self, terms: Terms, size: str, wiring: str) -> dict[int, float]:
        """Seed -> validation loss of the finished model."""
        return {seed: one.final_loss for seed, one in self.runs(terms, size, wiring).items()}

    def wirings(self, terms: Terms) -> tuple[str, ...]:
        """Those of a comparison, the baseline first."""
        named = self.study.wirings if terms == "tokens" else self.study.timed_wirings
        return (STANDARD, *(name for name in named if name != STANDARD))

    def speedup(self, size: str, wiring: str) -> float | None:
        """Baseline's step time over the wiring's; None while it is not measured."""
        times = self.study.step_times.get(size)
        if times is None:
            return None
        return 1.0 if wiring == STANDARD else times.speedup.get(wiring)

    def comparisons(self, terms: Terms, size: str) -> "dict[str, Comparison]":
        """Every wiring but the baseline -> how it ends, judged alone and as one of all in this table."""
        baseline = self.final_losses(terms, size, STANDARD)
        found = {
            wiring: paired(self.final_losses(terms, size, wiring), baseline) for wiring in self.wirings(terms)[1:]
        }
        adjusted = holm({wiring: one.p for wiring, one in found.items()})
        return {wiring: Comparison(one, adjusted[wiring]) for wiring, one in found.items()}

    def curves(self, terms: Terms, size: str, wiring: str) -> dict[int, Curve]:
        """Seed -> validation loss over tokens, or over time in steps of the baseline; none while it is not timed."""
        speedup = self.speedup(size, wiring)
        if terms == "time" and speedup is None:
            return {}
        step = self.study.tokens_per_step if terms == "tokens" else 1 / (speedup or 1.0)
        return {
            seed: tuple((iteration * step, loss) for iteration, loss in one.validation)
            for seed, one in self.runs(terms, size, wiring).items()
        }

    def missing(self) -> list[str]:
        """What is still to run, a phrase each."""
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
        """Whether no learning rate is left to train a wiring with: it is not run further."""
        losses = self.tuning(size, wiring)
        return len(losses) >= len(self.study.learning_rates) > 0 and not any(map(math.isfinite, losses.values()))

    def _of(self, kind: Kind, size: str, wiring: str) -> list[Result]:
        wanted = (kind, size, wiring)
        return [one for one in self.results if (one.trial.kind, one.trial.size, one.trial.wiring) == wanted]


@dataclass(frozen=True)
class Comparison:
    """A wiring against the baseline."""

    difference: Paired
    adjusted_p: float
    """Holm's, among all comparisons of its table; NaN where there is no interval."""

    @property
    def holds_among_all(self) -> bool:
        """Whether it is told apart although several comparisons are made."""
        return self.adjusted_p <= 1 - CONFIDENCE


def gather(folder: Path) -> Gathered:
    """Reads a study's folder, finished or not.

    Raises:
        UserError: there is no study in it, or a file of it cannot be read.
    """
    study = read_study(folder)
    if study is None:
        raise UserError(f"{folder}: no {STUDY_NAME}; expected the folder of a study")
    trials = folder / TRIALS_NAME
    places = sorted(path for path in trials.iterdir() if path.is_dir()) if trials.is_dir() else []
    results: list[Result] = []
    mistakes: list[str] = []
    for place in places:
        try:
            result = read_result(place)
        except UserError as error:
            mistakes += error.mistakes
        else:
            # Those of an adaptation have a report of their own.
            results += [] if result is None or result.trial.kind == "adapt" else [result]
    if mistakes:
        raise UserError(*mistakes)
    return Gathered(study, tuple(results))


def _phrases(what: str, short: Mapping[str, int]) -> list[str]:
    named: Sequence[str] = [f"{name} ({count})" for name, count in short.items() if count > 0]
    return [f"{what}: {', '.join(named)}"] if named else []
