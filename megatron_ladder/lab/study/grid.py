"""The grid of a study: its trials and their order.

1. tuning: every learning rate for every wiring, in shorter runs with a separate seed; the lowest validation loss wins.
   If the best rate is at the edge of the tried ones, further rates beyond it are tried, by the same rule for all.
2. tokens: every wiring with every seed, for the same number of steps.
3. time: some wirings again, for as many steps as they can do in the time of standard.

Seeds are the outermost loop, so that a study that is cut short has whole pairs.
"""

import math
from collections.abc import Mapping

from megatron_ladder.lab.study.description import Study
from megatron_ladder.lab.study.trial import Trial
from megatron_ladder.lab.study.wirings import STANDARD

MOST_FURTHER = 3
"""Most learning rates that a wiring can try beyond the given ones."""


def rate_key(size: str, wiring: str) -> str:
    """Return the key of `Study.chosen`."""
    return f"{size}/{wiring}"


def tuning_trials(study: Study) -> list[Trial]:
    """Return the trials that choose the learning rates; none if there is only one rate."""
    if len(study.learning_rates) == 1:
        return []
    return [
        Trial("tuning", wiring, size, study.tuning_seed, rate, study.tuning_iterations)
        for size in study.sizes
        for wiring in study.wirings
        for rate in study.learning_rates
    ]


def token_trials(study: Study) -> list[Trial]:
    """Return the trials at equal tokens, of the wirings whose learning rate is chosen."""
    return [
        Trial("tokens", wiring, size, seed, study.chosen[rate_key(size, wiring)], study.iterations)
        for seed in study.seeds
        for size in study.sizes
        for wiring in study.wirings
        if rate_key(size, wiring) in study.chosen
    ]


def time_trials(study: Study) -> list[Trial]:
    """Return the trials at equal time, of the sizes whose steps are timed.

    A wiring with as many steps as at equal tokens, like standard, has no separate trial: one run serves both.
    """
    trials = []
    for seed in study.seeds:
        for size, times in study.step_times.items():
            for wiring in study.timed_wirings:
                if wiring not in times.speedup or rate_key(size, wiring) not in study.chosen:
                    continue
                iterations = timed_iterations(study.iterations, times.speedup[wiring])
                if iterations != study.iterations:
                    rate = study.chosen[rate_key(size, wiring)]
                    trials.append(Trial("time", wiring, size, seed, rate, iterations))
    return trials


def timed_iterations(iterations: int, speedup: float) -> int:
    """Return the steps of a wiring in the time that standard takes for `iterations`."""
    return max(1, round(iterations * speedup))


def choose_learning_rates(study: Study, losses: Mapping[Trial, float]) -> dict[str, float]:
    """Return the best learning rate of each wiring whose tuning is complete, by its final validation loss.

    Args:
        losses: of the finished tuning trials; infinite if a trial diverged.

    Returns:
        `size/wiring` -> learning rate, without wirings that diverge at every rate.
    """
    pairs = [(size, wiring) for size in study.sizes for wiring in study.wirings]
    if len(study.learning_rates) == 1:
        return {rate_key(*pair): study.learning_rates[0] for pair in pairs}
    chosen = {}
    for size, wiring in pairs:
        tried = _tried_rates(study, losses, size, wiring)
        if any(rate not in tried for rate in study.learning_rates):
            continue
        best = min(tried, key=lambda rate: tried[rate])
        if math.isfinite(tried[best]):
            chosen[rate_key(size, wiring)] = best
    return chosen


def _tried_rates(study: Study, losses: Mapping[Trial, float], size: str, wiring: str) -> dict[float, float]:
    """Map each learning rate to the final loss of a wiring's finished tuning trial, ascending."""
    asked = ("tuning", wiring, size, study.tuning_seed, study.tuning_iterations)
    return dict(
        sorted(
            (trial.learning_rate, loss)
            for trial, loss in losses.items()
            if (trial.kind, trial.wiring, trial.size, trial.seed, trial.iterations) == asked
        )
    )


def further_trials(study: Study, losses: Mapping[Trial, float]) -> list[Trial]:
    """Return the next tuning trial for each wiring whose best learning rate is the lowest or highest tried so far.

    The ratio of the next rate to the best one equals the ratio of the best one to its neighbour. A wiring whose rate
    is chosen, or that has tried `MOST_FURTHER` further rates, gets none.
    """
    trials = []
    for size, wiring in [(size, wiring) for size in study.sizes for wiring in study.wirings]:
        tried = _tried_rates(study, losses, size, wiring)
        rates = list(tried)
        whole = all(rate in tried for rate in study.learning_rates)
        room = 1 < len(rates) < len(study.learning_rates) + MOST_FURTHER
        if rate_key(size, wiring) in study.chosen or not whole or not room:
            continue
        best = min(rates, key=lambda rate: tried[rate])
        neighbours = {rates[0]: rates[1], rates[-1]: rates[-2]}
        if best in neighbours and math.isfinite(tried[best]):
            # Rounded as in names and command lines.
            rate = float(f"{best * best / neighbours[best]:g}")
            trials.append(Trial("tuning", wiring, size, study.tuning_seed, rate, study.tuning_iterations))
    return trials


def at_the_edge(study: Study, losses: Mapping[Trial, float]) -> list[str]:
    """Return the keys of `chosen` whose learning rate is the highest or lowest tried."""
    found = []
    for size, wiring in [(size, wiring) for size in study.sizes for wiring in study.wirings]:
        rates = list(_tried_rates(study, losses, size, wiring))
        if len(rates) > 1 and study.chosen.get(rate_key(size, wiring)) in (rates[0], rates[-1]):
            found.append(rate_key(size, wiring))
    return found


def expected_trials(study: Study) -> list[Trial]:
    """Return all trials, with estimates for those that are not decided yet, to count them and their cost."""
    middle = sorted(study.learning_rates)[len(study.learning_rates) // 2]
    chosen = {rate_key(size, wiring): middle for size in study.sizes for wiring in study.wirings}
    if study.chosen:
        chosen = dict(study.chosen)
    decided = Study(**{**vars(study), "chosen": chosen})
    timed = [
        Trial("time", trial.wiring, trial.size, trial.seed, trial.learning_rate, trial.iterations)
        for trial in token_trials(decided)
        if trial.wiring in study.timed_wirings and trial.wiring != STANDARD and trial.size not in study.step_times
    ]
    return [*tuning_trials(decided), *token_trials(decided), *time_trials(decided), *timed]
