"""The trials of a study, their order, and the choice of learning rates."""

import math
from dataclasses import replace

import pytest

from ladder_lab.bench.sizes import SIZES
from ladder_lab.study.grid import (
    choose_learning_rates,
    expected_trials,
    further_trials,
    is_at_the_edge,
    time_trials,
    timed_iterations,
    token_trials,
    tried_rates,
    tuning_trials,
)
from ladder_lab.study.schema import Study, Trial, read_study, write_study
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import parse_layers
from megatron_ladder.config.run import parse_run, resolve_run
from tests.unit.ladder_lab.study.standing_in import SIZE, step_times, study_of

CHOSEN = {f"{SIZE}/{name}": rate for name, rate in zip(study_of().wirings, (1e-3, 2e-3, 4e-3, 2e-3, 2e-3), strict=True)}


def test_every_wiring_tries_every_learning_rate_with_the_tuning_seed() -> None:
    trials = tuning_trials(study_of())
    assert len(trials) == len(set(trials)) == 5 * 3
    assert {(trial.seed, trial.iterations) for trial in trials} == {(9, 25)}
    assert tuning_trials(study_of(learning_rates=(1e-3,))) == []


def test_seeds_are_the_outermost_loop() -> None:
    trials = token_trials(study_of(chosen=CHOSEN))
    assert [(trial.seed, trial.wiring) for trial in trials[:6]] == [
        (1, "standard"),
        (1, "parallel"),
        (1, "ladder"),
        (1, "hybrid"),
        (1, "desync-2x"),
        (2, "standard"),
    ]
    assert len(trials) == 10 and {trial.iterations for trial in trials} == {100}
    assert {trial.wiring: trial.learning_rate for trial in trials}["ladder"] == 4e-3


def test_a_wiring_without_a_learning_rate_is_left_out() -> None:
    chosen = {key: rate for key, rate in CHOSEN.items() if not key.endswith("/ladder")}
    study = study_of(chosen=chosen, step_times={SIZE: step_times(standard=1.0, parallel=1.5, ladder=2.0)})
    assert "ladder" not in {trial.wiring for trial in [*token_trials(study), *time_trials(study)]}


def test_equal_time_is_more_steps_and_standard_is_not_trained_twice() -> None:
    study = study_of(chosen=CHOSEN, step_times={SIZE: step_times(standard=1.0, parallel=1.004, ladder=1.357)})
    # 100 x 1.004 is 100 steps again.
    assert [(t.wiring, t.seed, t.iterations) for t in time_trials(study)] == [("ladder", 1, 136), ("ladder", 2, 136)]


@pytest.mark.parametrize(
    ("iterations", "speedup", "expected"), [(100, 1.0, 100), (1000, 1.2346, 1235), (100, 0.5, 50), (1, 0.1, 1)]
)
def test_steps_in_the_time_of_standard(iterations: int, speedup: float, expected: int) -> None:
    assert timed_iterations(study_of(iterations=iterations), speedup) == expected


def edges_of(study: Study, chosen: dict[str, float], losses: dict[Trial, float]) -> list[str]:
    """Return the wirings whose chosen learning rate is the lowest or highest tried."""
    tried = {wiring: tried_rates(study, losses, SIZE, wiring) for wiring in study.wirings}
    return [wiring for wiring in tried if is_at_the_edge(chosen.get(f"{SIZE}/{wiring}"), tried[wiring])]


def test_the_lowest_loss_wins_and_a_diverged_trial_never_does() -> None:
    study = study_of(wirings=("standard", "ladder", "parallel", "hybrid"))
    table = {"standard": (3.0, 2.5, math.inf), "ladder": (2.0, 2.1, 2.2), "parallel": (math.inf,) * 3}
    losses = {
        trial: table[trial.wiring][study.learning_rates.index(trial.learning_rate)]
        for trial in tuning_trials(study)
        if trial.wiring in table
    }
    chosen = choose_learning_rates(study, losses)
    # parallel always diverges, and hybrid has not been tried.
    assert chosen == {f"{SIZE}/standard": 2e-3, f"{SIZE}/ladder": 1e-3}
    assert edges_of(study, chosen, losses) == ["ladder"]
    assert choose_learning_rates(study_of(learning_rates=(5e-3,)), {})[f"{SIZE}/hybrid"] == 5e-3
    assert edges_of(study_of(learning_rates=(5e-3,)), CHOSEN, {}) == []


def losses_of(study: Study, **tables: dict[float, float]) -> dict[Trial, float]:
    """Map tuning trials to losses, given wiring -> learning rate -> loss."""
    return {
        Trial("tuning", wiring, SIZE, study.tuning_seed, rate, study.tuning_iterations): loss
        for wiring, table in tables.items()
        for rate, loss in table.items()
    }


def test_rates_beyond_the_edge_are_tried_until_the_best_is_inside() -> None:
    study = study_of(wirings=("standard", "ladder", "parallel", "hybrid"))
    losses = losses_of(
        study,
        standard={1e-3: 3.0, 2e-3: 3.1, 4e-3: 3.2},
        ladder={1e-3: 3.2, 2e-3: 3.1, 4e-3: 3.0},
        parallel={1e-3: 3.2, 2e-3: 3.1, 4e-3: 3.2},
        hybrid={1e-3: 3.0, 2e-3: 3.1},
    )
    # The best rate of parallel is inside, and hybrid has missing trials.
    assert [(one.wiring, one.learning_rate) for one in further_trials(study, losses)] == [
        ("standard", 5e-4),
        ("ladder", 8e-3),
    ]
    losses |= losses_of(study, standard={5e-4: 3.1}, ladder={8e-3: 2.9})
    assert [(one.wiring, one.learning_rate) for one in further_trials(study, losses)] == [("ladder", 16e-3)]
    assert further_trials(replace(study, chosen={f"{SIZE}/ladder": 8e-3}), losses) == []
    losses |= losses_of(study, ladder={16e-3: 2.8, 32e-3: 2.7})
    assert further_trials(study, losses) == [], "at most three further rates"
    chosen = choose_learning_rates(study, losses)
    assert chosen == {f"{SIZE}/standard": 1e-3, f"{SIZE}/ladder": 32e-3, f"{SIZE}/parallel": 2e-3}
    assert edges_of(study, chosen, losses) == ["ladder"]


def test_no_further_rate_is_tried_if_all_diverge() -> None:
    study = study_of(wirings=("ladder",))
    assert further_trials(study, losses_of(study, ladder=dict.fromkeys((1e-3, 2e-3, 4e-3), math.inf))) == []
    diverged = losses_of(study, ladder={1e-3: 3.0, 2e-3: math.inf, 4e-3: math.inf})
    assert [one.learning_rate for one in further_trials(study, diverged)] == [5e-4]


def test_all_trials_are_counted_before_they_are_decided() -> None:
    # 15 tuning trials, 5 wirings x 2 seeds, and the timed wirings except standard x 2 seeds.
    assert len(expected_trials(study_of())) == 15 + 10 + 4
    decided = study_of(chosen=CHOSEN, step_times={SIZE: step_times(standard=1.0, parallel=1.0, ladder=1.5)})
    assert len(expected_trials(decided)) == 15 + 10 + 2


def test_names_of_trials_are_unique() -> None:
    study = study_of(chosen=CHOSEN, step_times={SIZE: step_times(standard=1.0, parallel=1.5, ladder=2.0)})
    trials = expected_trials(study)
    assert len({trial.name for trial in trials}) == len(trials)


def test_a_study_is_read_as_it_was_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    study = study_of(chosen=CHOSEN, step_times={SIZE: step_times(standard=1.0, ladder=2.0)})
    write_study(tmp_path, study)
    assert read_study(tmp_path) == study


def test_wirings_have_the_flags_of_the_trainer() -> None:
    assert NAMED_WIRINGS["standard"].flags(8, 1) == ("--residual-mode", "standard")
    hybrid = NAMED_WIRINGS["hybrid"].flags(8, 1)
    assert parse_layers(hybrid[hybrid.index("--ladder-layers") + 1], 8) == (4, 5, 6, 7)
    ranks = {name: wiring.fewest_ranks for name, wiring in NAMED_WIRINGS.items() if wiring.fewest_ranks > 1}
    assert set(ranks.values()) == {2}
    assert set(ranks) == {"own-partials-1", "own-partials-2", "own-partials-4", "desync-2x", "desync-4x"}


@pytest.mark.parametrize("name", NAMED_WIRINGS)
def test_a_model_in_a_wiring_is_the_one_of_its_flags(name: str) -> None:
    model = SIZES["small"]
    words = "--train-iters 2 --lr 1 --tensor-model-parallel-size 2".split()
    words += [*model.to_words(), *NAMED_WIRINGS[name].flags(model.num_layers, 2)]
    errors: list[str] = []
    run = resolve_run(parse_run(words, errors), model.vocab_size, 2, errors)
    assert not errors and run.model == NAMED_WIRINGS[name].of(model, 2)
