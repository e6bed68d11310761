"""What an adaptation runs, and what it may say of what came out."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ladder.errors import UserError
from megatron_ladder.lab.study.adapt_report import adaptation_report, draw_adaptation, verdict
from megatron_ladder.lab.study.adaptation import (
    ADAPTATION_NAME,
    Adaptation,
    Adapted,
    adaptation_mistakes,
    default_upper,
    read_adaptation,
)
from megatron_ladder.lab.study.trial import Result, Trial

PLAN = Adaptation(
    size="small", num_layers=8, upper=(0, 4, 8), percents=(1, 10), seeds=(1, 2), standard_learning_rate=1e-2,
    standard_iterations=250, learning_rate=2e-3,
)  # fmt: skip
Loss = Callable[[Trial], float]


def results_of(trials: list[Trial], loss: Loss) -> dict[Trial, Result]:
    return {
        trial: Result(trial, 10, 64, (), ((trial.iterations, loss(trial)),), 0.0, 0.0, 1, (), {}) for trial in trials
    }


def adapted_of(loss: Loss, plan: Adaptation = PLAN) -> Adapted:
    trials = [trial for _, _, trial in plan.trials()]
    return Adapted.of(plan, results_of(trials, loss))


def by_hand(trial: Trial) -> float:
    """Standard models end at 3.00 and 3.02. Healing takes 0.1 off; half a ladder costs 1.0, 0.03 and 0.01, a whole
    one 3.0, 0.5 and 0.2: after no healing, after 1 % and after 10 %."""
    upper, percent = trial.detail.split("-")[:2]
    costs = {
        "upper0": {"0pct": 0.0, "1pct": 0.0, "10pct": 0.0},
        "upper4": {"0pct": 1.0, "1pct": 0.03, "10pct": 0.01},
        "upper8": {"0pct": 3.0, "1pct": 0.5, "10pct": 0.2},
    }
    return 3.0 + 0.02 * (trial.seed - 1) + costs[upper][percent] - 0.1 * (percent != "0pct")


def noisy(trial: Trial) -> float:
    """The same, and what is rewired is 0.005 worse with one seed and better with the other."""
    return by_hand(trial) + 0.005 * (2 * trial.seed - 3) * (not trial.detail.startswith("upper0"))


def test_every_seed_is_rewired_and_healed_at_every_length() -> None:
    trials = [trial for _, _, trial in PLAN.trials()]
    # The control without healing is the standard model itself, validated on the samples that the others are.
    assert len(trials) == len({trial.name for trial in trials}) == 2 * 3 * 3
    assert [trial.iterations for trial in trials] == [0] * 6 + [2] * 6 + [25] * 6
    assert {trial.learning_rate for trial in trials if trial.iterations} == {2e-3}
    assert PLAN.standard(2) == Trial("tokens", "standard", "small", 2, 1e-2, 250)
    last = trials[-1]
    assert last == Trial("adapt", "ladder", "small", 2, 2e-3, 25, "upper8-10pct-of-250")
    assert {trial.wiring for upper, _, trial in PLAN.trials() if upper == 0} == {"standard"}


def test_a_healing_of_a_short_training_has_a_step() -> None:
    assert replace(PLAN, standard_iterations=12).iterations(1) == 1 and PLAN.iterations(0) == 0


@pytest.mark.parametrize(("layers", "upper"), [(8, (0, 2, 4, 6, 8)), (6, (0, 1, 3, 4, 6)), (2, (0, 1, 2)), (1, (0, 1))])
def test_quarters_of_the_layers(layers: int, upper: tuple[int, ...]) -> None:
    assert default_upper(layers) == upper


def test_numbers_that_cannot_be_are_named_together() -> None:
    mistakes = adaptation_mistakes(8, (0, 8, 9, -1), (1, 100, 0, 101))
    assert [line.split(":")[0] for line in mistakes] == [
        "--adapt-layers 9", "--adapt-layers -1", "--healing-percent 0", "--healing-percent 101"
    ]  # fmt: skip


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_adaptation(tmp_path) is None
    PLAN.write(tmp_path)
    assert read_adaptation(tmp_path) == PLAN and [path.name for path in tmp_path.iterdir()] == [ADAPTATION_NAME]
    values = json.loads((tmp_path / ADAPTATION_NAME).read_text())
    del values["percents"]
    (tmp_path / ADAPTATION_NAME).write_text(json.dumps(values))
    with pytest.raises(UserError, match="not an adaptation of this version"):
        read_adaptation(tmp_path)


def test_differences_are_those_of_a_seed() -> None:
    adapted = adapted_of(by_hand)
    assert adapted.to_control(4, 0).differences == pytest.approx((1.0, 1.0))
    assert adapted.to_control(8, 10).differences == pytest.approx((0.2, 0.2))
    assert adapted.to_before(4, 1).differences == pytest.approx((-0.07, -0.07))
    assert adapted.losses[0, 0] == adapted.before == {1: 3.0, 2: 3.02}


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_the_table_by_hand() -> None:
    """The standard deviation of 3.00 and 3.02 is 0.0141."""
    rows = rows_of(adaptation_report(adapted_of(by_hand)))
    assert rows[0] == ["upper layers", "standard, before", "zero-shot", "healed 1 %", "healed 10 %"]
    assert rows[2] == ["0, the control", "3.0100 ± 0.0141", "-", "2.9100 ± 0.0141", "2.9100 ± 0.0141"]
    assert rows[3] == ["4", "3.0100 ± 0.0141", "4.0100 ± 0.0141", "2.9400 ± 0.0141", "2.9200 ± 0.0141"]
    assert rows[5] == ["upper layers", "zero-shot", "healed 1 %", "healed 10 %"]
    assert rows[7:] == [
        ["4", "+1.0000 ± 0.0000", "+0.0300 ± 0.0000", "+0.0100 ± 0.0000"],
        ["8", "+3.0000 ± 0.0000", "+0.5000 ± 0.0000", "+0.2000 ± 0.0000"],
    ]


def test_who_is_back_is_said_plainly() -> None:
    """0.01 is within the spread of 0.0141, 0.03 is not; before the further training the bar was 0.1 higher."""
    *_, control, before = verdict(adapted_of(noisy))
    assert "back within the spread over seeds: **upper 4 after 10 %**" in control
    assert control.endswith("Not back after any length: upper 8.")
    assert "**upper 4 after 1 %, 10 %**" in before and before.endswith("Not back after any length: upper 8.")


def test_what_is_back_and_worse_in_every_pair_is_said_to_be_worse() -> None:
    *_, control, before = verdict(adapted_of(by_hand))
    assert "**upper 4 after 10 % (though told apart as worse)**" in control
    assert "told apart" not in before


def test_that_nobody_is_back_is_said_plainly() -> None:
    worse = adapted_of(lambda trial: by_hand(trial) + ("upper4" in trial.detail) + ("upper8" in trial.detail))
    *_, control, before = verdict(worse)
    assert "**no** hybrid is back" in control and "**no** hybrid is back" in before
    assert "trained on for as long" in control and "as it was before" in before


def test_nothing_is_said_of_one_seed_or_of_half_the_runs() -> None:
    one = verdict(adapted_of(by_hand, replace(PLAN, seeds=(1,))))
    assert [("nothing can be said" in line) for line in one[-2:]] == [True, True]
    trials = [trial for _, _, trial in PLAN.trials()]
    half = Adapted.of(PLAN, results_of(trials[:-1], by_hand))
    assert [("nothing is said yet" in line) for line in verdict(half)[-2:]] == [True, True]
    assert rows_of(adaptation_report(half))[-1][-1] == "+0.2000 (1 of 2)"
    assert rows_of(adaptation_report(half))[4][-1] == "3.1000 (1 of 2)"
    assert "**This adaptation is not finished**: 1 of 18 runs are missing." in adaptation_report(half)
    assert "not finished" not in adaptation_report(adapted_of(by_hand))
    nothing = rows_of(adaptation_report(Adapted.of(PLAN, {})))
    assert {cell for row in nothing[2:5] for cell in row[1:]} == {"-"}


def test_runs_of_another_plan_do_not_count() -> None:
    other = replace(PLAN, learning_rate=1e-3)
    trials = [trial for _, _, trial in other.trials() if trial.iterations]
    assert not any(by_seed for by_seed in Adapted.of(PLAN, results_of(trials, by_hand)).losses.values())


def test_a_loss_that_is_no_number_is_not_back() -> None:
    broken = adapted_of(lambda trial: math.nan if "upper4-10pct" in trial.detail else by_hand(trial))
    *_, control, _ = verdict(broken)
    assert "**no** hybrid is back" in control


def test_the_picture_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_adaptation(adapted_of(by_hand)).savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    draw_adaptation(Adapted.of(PLAN, {})).savefig(tmp_path / "b.png")
