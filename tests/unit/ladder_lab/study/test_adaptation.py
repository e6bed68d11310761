"""The trials of an adaptation, and its report."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ladder_lab.study.adaptation import (
    ADAPTATION_NAME,
    Adaptation,
    _adaptation_report,
    _AdaptationResults,
    _draw_adaptation,
    _findings,
    _read_adaptation,
    default_upper,
)
from ladder_lab.study.schema import Result, Trial, write_json
from megatron_ladder.errors import UserError

PLAN = Adaptation(
    size="small",
    num_layers=8,
    upper=(0, 4, 8),
    percents=(1, 10),
    seeds=(1, 2),
    standard_learning_rate=1e-2,
    standard_iterations=250,
    learning_rate=2e-3,
)
Loss = Callable[[Trial], float]


def results_of(trials: list[Trial], loss: Loss) -> dict[Trial, Result]:
    return {
        trial: Result(trial, 10, 64, (), ((trial.iterations, loss(trial)),), 0.0, 0.0, 1, (), {}) for trial in trials
    }


def adapted_of(loss: Loss, plan: Adaptation = PLAN) -> _AdaptationResults:
    trials = [trial for _, _, trial in plan.trials()]
    return _AdaptationResults(plan, results_of(trials, loss))


def by_hand(trial: Trial) -> float:
    """Return the loss of a trial. Standard models end at 3.00 and 3.02, and healing subtracts 0.1. Half a ladder adds
    1.0, 0.03 and 0.01, and a whole one 3.0, 0.5 and 0.2, after 0 %, 1 % and 10 % healing."""
    upper, percent = trial.detail.split("-")[:2]
    costs = {
        "upper0": {"0pct": 0.0, "1pct": 0.0, "10pct": 0.0},
        "upper4": {"0pct": 1.0, "1pct": 0.03, "10pct": 0.01},
        "upper8": {"0pct": 3.0, "1pct": 0.5, "10pct": 0.2},
    }
    return 3.0 + 0.02 * (trial.seed - 1) + costs[upper][percent] - 0.1 * (percent != "0pct")


def noisy(trial: Trial) -> float:
    """Return the same loss; rewired models are 0.005 worse with one seed and better with the other."""
    return by_hand(trial) + 0.005 * (2 * trial.seed - 3) * (not trial.detail.startswith("upper0"))


def test_every_seed_is_rewired_and_healed_at_every_length() -> None:
    trials = [trial for _, _, trial in PLAN.trials()]
    # The control without healing is the standard model, validated on the same samples as the others.
    assert len(trials) == len({trial.name for trial in trials}) == 2 * 3 * 3
    assert [trial.iterations for trial in trials] == [0] * 6 + [2] * 6 + [25] * 6
    assert {trial.learning_rate for trial in trials if trial.iterations} == {2e-3}
    assert PLAN.standard(2) == Trial("tokens", "standard", "small", 2, 1e-2, 250)
    last = trials[-1]
    assert last == Trial("adapt", "ladder", "small", 2, 2e-3, 25, "upper8-10pct-of-250")
    assert {trial.wiring for upper, _, trial in PLAN.trials() if upper == 0} == {"standard"}


def test_healing_of_a_short_training_has_at_least_one_step() -> None:
    assert replace(PLAN, standard_iterations=12).iterations(1) == 1 and PLAN.iterations(0) == 0


@pytest.mark.parametrize(("layers", "upper"), [(8, (0, 2, 4, 6, 8)), (6, (0, 1, 3, 4, 6)), (2, (0, 1, 2)), (1, (0, 1))])
def test_quarters_of_the_layers(layers: int, upper: tuple[int, ...]) -> None:
    assert default_upper(layers) == upper


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert _read_adaptation(tmp_path) is None
    write_json(tmp_path / ADAPTATION_NAME, PLAN)
    assert _read_adaptation(tmp_path) == PLAN and [path.name for path in tmp_path.iterdir()] == [ADAPTATION_NAME]
    values = json.loads((tmp_path / ADAPTATION_NAME).read_text())
    del values["percents"]
    (tmp_path / ADAPTATION_NAME).write_text(json.dumps(values))
    with pytest.raises(UserError, match="not an adaptation of this version"):
        _read_adaptation(tmp_path)


def test_differences_are_those_of_a_seed() -> None:
    adapted = adapted_of(by_hand)
    assert adapted.difference(4, 0, 0).differences == pytest.approx((1.0, 1.0))
    assert adapted.difference(8, 10, 10).differences == pytest.approx((0.2, 0.2))
    assert adapted.difference(4, 1, 0).differences == pytest.approx((-0.07, -0.07))
    assert adapted.losses(0, 0) == {1: 3.0, 2: 3.02}


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_the_table_by_hand() -> None:
    """The standard deviation of 3.00 and 3.02 is 0.0141."""
    rows = rows_of(_adaptation_report(adapted_of(by_hand)))
    assert rows[0] == ["upper layers", "standard, before", "zero-shot", "healed 1 %", "healed 10 %"]
    assert rows[2] == ["0, the control", "3.0100 ± 0.0141", "–", "2.9100 ± 0.0141", "2.9100 ± 0.0141"]
    assert rows[3] == ["4", "3.0100 ± 0.0141", "4.0100 ± 0.0141", "2.9400 ± 0.0141", "2.9200 ± 0.0141"]
    assert rows[5] == ["upper layers", "zero-shot", "healed 1 %", "healed 10 %"]
    assert rows[7:] == [
        ["4", "+1.0000 ± 0.0000", "+0.0300 ± 0.0000", "+0.0100 ± 0.0000"],
        ["8", "+3.0000 ± 0.0000", "+0.5000 ± 0.0000", "+0.2000 ± 0.0000"],
    ]


def test_hybrids_that_are_back_are_named() -> None:
    """0.01 is within the spread of 0.0141, and 0.03 is not; before the additional training the bar was 0.1 higher."""
    control, before = _findings(adapted_of(noisy))
    assert control.endswith("these are back: **upper 4 after 10 %**; not back after any length: upper 8.")
    assert before.endswith("these are back: **upper 4 after 1 %, 10 %**; not back after any length: upper 8.")


def test_a_significant_difference_within_the_spread_is_marked() -> None:
    control, before = _findings(adapted_of(by_hand))
    assert "**upper 4 after 10 % (though significantly worse)**" in control
    assert "significantly" not in before


def test_it_is_stated_if_no_hybrid_is_back() -> None:
    worse = adapted_of(lambda trial: by_hand(trial) + ("upper4" in trial.detail) + ("upper8" in trial.detail))
    control, before = _findings(worse)
    assert "**no** hybrid is back" in control and "**no** hybrid is back" in before
    assert "trained for as long" in control and "original standard model" in before


def test_one_seed_or_missing_runs_give_no_conclusion() -> None:
    one = _findings(adapted_of(by_hand, replace(PLAN, seeds=(1,))))
    assert all("no conclusion, because one seed" in sentence for sentence in one)
    trials = [trial for _, _, trial in PLAN.trials()]
    half = _AdaptationResults(PLAN, results_of(trials[:-1], by_hand))
    assert all("no conclusion yet" in sentence for sentence in _findings(half))
    assert rows_of(_adaptation_report(half))[-1][-1] == "+0.2000 (1 of 2)"
    assert rows_of(_adaptation_report(half))[4][-1] == "3.1000 (1 of 2)"
    assert "**This adaptation is not finished**: 1 of 18 runs are missing." in _adaptation_report(half)
    assert "not finished" not in _adaptation_report(adapted_of(by_hand))
    nothing = rows_of(_adaptation_report(_AdaptationResults(PLAN, {})))
    assert {cell for row in nothing[2:5] for cell in row[1:]} == {"–"}


def test_runs_of_another_plan_are_ignored() -> None:
    other = replace(PLAN, learning_rate=1e-3)
    trials = [trial for _, _, trial in other.trials() if trial.iterations]
    adapted = _AdaptationResults(PLAN, results_of(trials, by_hand))
    assert not any(adapted.losses(upper, percent) for upper in PLAN.upper for percent in PLAN.percents)


def test_a_nan_loss_is_not_back() -> None:
    broken = adapted_of(lambda trial: math.nan if "upper4-10pct" in trial.detail else by_hand(trial))
    control, _ = _findings(broken)
    assert "**no** hybrid is back" in control


def test_a_png_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _draw_adaptation(adapted_of(by_hand)).savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    _draw_adaptation(_AdaptationResults(PLAN, {})).savefig(tmp_path / "b.png")
