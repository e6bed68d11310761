"""Which trainings a study consists of, and in which order.

1. tuning: every learning rate for every wiring, shorter, with a seed of its own; the lowest validation loss wins. Where
   that is at the edge of those tried, further ones beyond it are tried, by the same rule for every wiring.
2. tokens: every wiring with every seed, for the same number of steps.
3. time: some wirings again, for as many steps as they take in the time of standard's.

Seeds are the outermost loop, so that a study that is cut short has whole pairs.
"""

import math
from collections.abc import Mapping

from megatron_ladder.lab.study.description import Study
from megatron_ladder.lab.study.trial import Trial
from megatron_ladder.lab.study.wirings import STANDARD

MOST_FURTHER = 3
"""Learning rates that a wiring may try beyond those that were asked for."""


def key_of(size: str, wiring: str) -> str:
    """Under which a study keeps the chosen learning rate."""
    return f"{size}/{wiring}"


def tuning_trials(study: Study) -> list[Trial]:
    """Those that choose the learning rates; none if there is nothing to choose."""
    if len(study.learning_rates) == 1:
        return []
    return [
        Trial("tuning", wiring, size, study.tuning_seed, rate, study.tuning_iterations)
        for size in study.sizes
        for wiring in study.wirings
        for rate in study.learning_rates
    ]


def token_trials(study: Study) -> list[Trial]:
    """Those at equal tokens, of the wirings whose learning rate is chosen."""
    return [
        Trial("tokens", wiring, size, seed, study.chosen[key_of(size, wiring)], study.iterations)
        for seed in study.seeds
        for size in study.sizes
        for wiring in study.wirings
        if key_of(size, wiring) in study.chosen
    ]


def time_trials(study: Study) -> list[Trial]:
    """Those at equal time, of the sizes whose steps are timed.

    A wiring that takes as many steps as at equal tokens, like standard, has no trial of its own: that one is both.
    """
    trials = []
    for seed in study.seeds:
        for size, times in study.step_times.items():
            for wiring in study.timed_wirings:
                if wiring not in times.speedup or key_of(size, wiring) not in study.chosen:
                    continue
                iterations = timed_iterations(study.iterations, times.speedup[wiring])
                if iterations != study.iterations:
                    rate = study.chosen[key_of(size, wiring)]
                    trials.append(Trial("time", wiring, size, seed, rate, iterations))
    return trials


def timed_iterations(iterations: int, speedup: float) -> int:
    """Steps of a wiring in the time that standard takes for `iterations`."""
    return max(1, round(iterations * speedup))


def choose_learning_rates(study: Study, losses: Mapping[Trial, float]) -> dict[str, float]:
    """The best learning rate of each wiring whose tuning is complete, by its final validation loss.

    Args:
        losses: of the tuning trials that are done; infinite where one has diverged.

    Returns:
        `size/wiring` -> learning rate. A wiring that diverges at every one has none.
    """
    pairs = [(size, wiring) for size in study.sizes for wiring in study.wirings]
    if len(study.learning_rates) == 1:
        return {key_of(*pair): study.learning_rates[0] for pair in pairs}
    chosen = {}
    for size, wiring in pairs:
        tried = tried_rates(study, losses, size, wiring)
        if any(rate not in tried for rate in study.learning_rates):
            continue
        best = min(tried, key=lambda rate: tried[rate])
        if math.isfinite(tried[best]):
            chosen[key_of(size, wiring)] = best
    return chosen


def tried_rates(study: Study, losses: Mapping[Trial, float], size: str, wiring: str) -> dict[float, float]:
    """Learning rate -> final loss of the tuning trials of a wiring that are done, ascending."""
    asked = ("tuning", wiring, size, study.tuning_seed, study.tuning_iterations)
    return dict(
        sorted(
            (trial.learning_rate, loss)
            for trial, loss in losses.items()
            if (trial.kind, trial.wiring, trial.size, trial.seed, trial.iterations) == asked
        )
    )


def further_trials(study: Study, losses: Mapping[Trial, float]) -> list[Trial]:
    """The next learning rate for each wiring whose best one is the lowest or the highest that it has tried so far.

    It is as far from the best one, as a factor, as that is from its neighbour. A wiring whose rate is chosen gets none,
    nor does one that has tried `MOST_FURTHER`.
    """
    trials = []
    for size, wiring in [(size, wiring) for size in study.sizes for wiring in study.wirings]:
        tried = tried_rates(study, losses, size, wiring)
        rates = list(tried)
        whole = all(rate in tried for rate in study.learning_rates)
        room = 1 < len(rates) < len(study.learning_rates) + MOST_FURTHER
        if key_of(size, wiring) in study.chosen or not whole or not room:
            continue
        best = min(rates, key=lambda rate: tried[rate])
        neighbours = {rates[0]: rates[1], rates[-1]: rates[-2]}
        if best in neighbours and math.isfinite(tried[best]):
            # As it is written in names and command lines.
            rate = float(f"{best * best / neighbours[best]:g}")
            trials.append(Trial("tuning", wiring, size, study.tuning_seed, rate, study.tuning_iterations))
    return trials


def at_the_edge(study: Study, losses: Mapping[Trial, float]) -> list[str]:
    """Keys of `chosen` whose learning rate is the highest or lowest that was tried: one beyond it may be better."""
    found = []
    for size, wiring in [(size, wiring) for size in study.sizes for wiring in study.wirings]:
        rates = list(tried_rates(study, losses, size, wiring))
        if len(rates) > 1 and study.chosen.get(key_of(size, wiring)) in (rates[0], rates[-1]):
            found.append(key_of(size, wiring))
    return found


def expected_trials(study: Study) -> list[Trial]:
    """All trials, those that are not settled yet as they may become: for counting them and what they cost."""
    middle = sorted(study.learning_rates)[len(study.learning_rates) // 2]
    chosen = {key_of(size, wiring): middle for size in study.sizes for wiring in study.wirings}
    if study.chosen:
        chosen = dict(study.chosen)
    settled = Study(**{**vars(study), "chosen": chosen})
    timed = [
        Trial("time", trial.wiring, trial.size, trial.seed, trial.learning_rate, trial.iterations)
        for trial in token_trials(settled)
        if trial.wiring in study.timed_wirings and trial.wiring != STANDARD and trial.size not in study.step_times
    ]
    return [*tuning_trials(settled), *token_trials(settled), *time_trials(settled), *timed]
