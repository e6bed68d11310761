"""The grid of a study: its trials and their order.

1. tuning: every learning rate for every wiring, in shorter runs with a separate seed; the lowest validation loss wins.
   If the best rate is at the edge of the tried ones, rates beyond it are tried.
2. tokens: every wiring with every seed, for the same number of steps.
3. time: some wirings again, for as many steps as they can do in the time of standard.

Seeds are the outermost loop, so that an interrupted study has whole pairs.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from ladder_lab.study.schema import Study, Trial, rate_key
from ladder_lab.study.wirings import STANDARD

MOST_FURTHER = 3
"""Most learning rates that are tried beyond the grid."""


def tuning_trials(study: Study) -> list[Trial]:
    """Return the trials that choose the learning rates; none if there is only one rate."""
    rates = study.learning_rates if len(study.learning_rates) > 1 else ()
    return [_tuning_trial(study, *model, rate) for model in study.models for rate in rates]


def _tuning_trial(study: Study, size: str, wiring: str, rate: float) -> Trial:
    return Trial("tuning", wiring, size, study.tuning_seed, rate, study.tuning_iterations)


def token_trials(study: Study) -> list[Trial]:
    """Return the trials at equal tokens, of the wirings whose learning rate is chosen."""
    return [
        Trial("tokens", wiring, size, seed, study.chosen[rate_key(size, wiring)], study.iterations)
        for seed in study.seeds
        for size, wiring in study.models
        if rate_key(size, wiring) in study.chosen
    ]


def time_trials(study: Study) -> list[Trial]:
    """Return the trials at equal time; a wiring with as many steps as at equal tokens, like standard, has none."""
    trials = [
        Trial("time", wiring, size, seed, study.chosen[rate_key(size, wiring)], timed_iterations(study, speedup))
        for seed in study.seeds
        for size, times in study.step_times.items()
        for wiring, speedup in times.speedup.items()
        if wiring in study.timed_wirings and rate_key(size, wiring) in study.chosen
    ]
    return [trial for trial in trials if trial.iterations != study.iterations]


def untimed_wirings(study: Study, size: str) -> tuple[str, ...]:
    """Return the wirings to train for equal time whose step at this size is not measured yet."""
    times = study.step_times.get(size)
    return tuple(name for name in study.timed_wirings if times is None or name not in times.speedup)


def timed_iterations(study: Study, speedup: float) -> int:
    """Return the steps of a wiring in the time that standard takes for the study's number of steps."""
    return max(1, round(study.iterations * speedup))


def tried_rates(study: Study, losses: Mapping[Trial, float], size: str, wiring: str) -> dict[float, float]:
    """Map each learning rate to the final loss of a wiring's finished tuning trial, ascending."""
    trials = {rate: _tuning_trial(study, size, wiring, rate) for rate in sorted(one.learning_rate for one in losses)}
    return {rate: losses[trial] for rate, trial in trials.items() if trial in losses}


def choose_learning_rates(study: Study, losses: Mapping[Trial, float]) -> dict[str, float]:
    """Map `size/wiring` to the learning rate with the lowest loss, if tuning is complete and a loss is finite."""
    if len(study.learning_rates) == 1:
        return {rate_key(*model): study.learning_rates[0] for model in study.models}
    chosen = {}
    for model in study.models:
        tried = tried_rates(study, losses, *model)
        if tried and tried.keys() >= {*study.learning_rates} and math.isfinite(min(tried.values())):
            chosen[rate_key(*model)] = min(tried, key=lambda rate: tried[rate])
    return chosen


def further_trials(study: Study, losses: Mapping[Trial, float]) -> list[Trial]:
    """Return the next tuning trial for each wiring whose best learning rate is the lowest or highest tried so far.

    A wiring whose rate is chosen, or with `MOST_FURTHER` of them, gets none.
    """
    trials = []
    for model in study.models:
        tried = tried_rates(study, losses, *model)
        has_room = len(tried) < len(study.learning_rates) + MOST_FURTHER
        if rate_key(*model) in study.chosen or not has_room or not tried.keys() >= {*study.learning_rates}:
            continue
        if (rate := value_beyond(tried)) is not None:
            trials.append(_tuning_trial(study, *model, rate))
    return trials


def value_beyond(losses: Mapping[float, float]) -> float | None:
    """Return the next value of the geometric series beyond the best value; None if the best is between two others.

    Args:
        losses: the loss of each value that was tried.
    """
    values = sorted(losses)
    best = min(values, key=lambda value: losses[value])
    if not is_at_the_edge(best, losses) or not math.isfinite(losses[best]):
        return None
    neighbour = values[1] if best == values[0] else values[-2]
    # Names and command lines of trials contain it.
    return float(f"{best * best / neighbour:.3g}")


def is_at_the_edge(rate: float | None, tried: Mapping[float, float]) -> bool:
    """Return whether a learning rate is the lowest or highest of several that were tried."""
    return len(tried) > 1 and rate in (min(tried), max(tried))


def expected_trials(study: Study, diverged: Collection[str] = ()) -> list[Trial]:
    """Return all trials, with estimates for those that are not decided yet, to count them and their cost.

    `diverged` has the keys of the models that diverged at every rate, which are not trained.
    """
    decided = study
    if study.learning_rates:
        middle = sorted(study.learning_rates)[len(study.learning_rates) // 2]
        undecided = {rate_key(*model): middle for model in study.models if rate_key(*model) not in diverged}
        decided = replace(study, chosen={**undecided, **study.chosen})
    timed = [
        replace(trial, kind="time")
        for trial in token_trials(decided)
        if trial.wiring in untimed_wirings(study, trial.size) and trial.wiring != STANDARD
    ]
    return [*tuning_trials(decided), *token_trials(decided), *time_trials(decided), *timed]
