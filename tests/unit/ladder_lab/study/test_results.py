"""Selection of a study's results by purpose, and the list of missing trials."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ladder_lab.study.results import read_results
from ladder_lab.study.schema import RESULT_NAME
from megatron_ladder.errors import UserError
from tests.unit.ladder_lab.study.synthetic import made_up_study, write_all, write_run, write_study


def test_runs_with_other_settings_are_ignored(tmp_path: Path) -> None:
    write_study(tmp_path, made_up_study())
    write_run(tmp_path, "tokens", "ladder", 2, 3.2)
    write_run(tmp_path, "tokens", "ladder", 2, 1.0, rate=4e-3)
    write_run(tmp_path, "tokens", "ladder", 1, 1.0, iterations=99)
    write_run(tmp_path, "tokens", "ladder", 7, 1.0)
    write_run(tmp_path, "tokens", "ladder", 3, 1.0, size="other")
    write_run(tmp_path, "time", "ladder", 3, 3.3, iterations=150)
    write_run(tmp_path, "time", "ladder", 2, 1.0, iterations=140)
    write_run(tmp_path, "tuning", "ladder", 9, 3.4, iterations=40)
    write_run(tmp_path, "tuning", "ladder", 99, 9.0, iterations=40)
    results = read_results(tmp_path)
    assert results.final_losses("tokens", "tiny", "ladder") == {2: pytest.approx(3.2)}
    assert results.final_losses("time", "tiny", "ladder") == {3: pytest.approx(3.3)}
    assert results.tuning("tiny", "ladder") == {2e-3: pytest.approx(3.4)}


def test_runs_of_the_same_length_serve_equal_tokens_and_equal_time(tmp_path: Path) -> None:
    study = made_up_study()
    slow = replace(study.step_times["tiny"], speedup={"standard": 1.0, "parallel": 1.001})
    write_study(tmp_path, replace(study, step_times={"tiny": slow}))
    for wiring in ("standard", "parallel", "ladder"):
        write_run(tmp_path, "tokens", wiring, 1, 3.0)
    results = read_results(tmp_path)
    assert [len(results.runs("time", "tiny", name)) for name in ("standard", "parallel", "ladder")] == [1, 1, 0]
    assert results.missing()[-1] == "tiny, equal time: parallel (2)"


def test_time_is_counted_in_steps_of_standard(tmp_path: Path) -> None:
    write_study(tmp_path, made_up_study())
    write_run(tmp_path, "time", "ladder", 1, 3.0, iterations=150)
    write_run(tmp_path, "tokens", "hybrid", 1, 3.0)
    results = read_results(tmp_path)
    positions = [position for position, _ in results.curves("time", "tiny", "ladder")[1]]
    assert positions == pytest.approx([10 * step for step in range(1, 11)])
    assert results.curves("tokens", "tiny", "hybrid")[1][-1] == (100_000, pytest.approx(3.0))
    assert results.curves("time", "tiny", "hybrid") == {}


def test_comparisons_are_paired_by_seed_and_adjusted_within_their_table(tmp_path: Path) -> None:
    write_study(tmp_path, made_up_study())
    for seed, loss in ((1, 3.0), (2, 4.0), (3, 5.0)):
        write_run(tmp_path, "tokens", "standard", seed, loss)
        write_run(tmp_path, "tokens", "ladder", seed, loss + 0.1 + 0.001 * seed)
        write_run(tmp_path, "tokens", "parallel", seed, loss + 0.1 * (seed - 2))
    found = read_results(tmp_path).comparisons("tokens", "tiny")
    ladder, parallel, hybrid = found["ladder"], found["parallel"], found["hybrid"]
    assert ladder.difference.mean == pytest.approx(0.102)
    assert ladder.adjusted_p == pytest.approx(2 * ladder.difference.p) and ladder.holds_among_all
    assert parallel.difference.mean == pytest.approx(0.0, abs=1e-12) and not parallel.holds_among_all
    assert hybrid.difference.pairs == 0 and not hybrid.holds_among_all


def test_a_finished_study_has_no_missing_trials(tmp_path: Path) -> None:
    write_all(tmp_path, made_up_study(), {})
    assert read_results(tmp_path).missing() == []


def test_missing_trials_are_counted(tmp_path: Path) -> None:
    study = made_up_study(step_times={}, chosen={"tiny/standard": 2e-3})
    write_study(tmp_path, study)
    write_run(tmp_path, "tuning", "standard", 9, 3.0, iterations=40)
    write_run(tmp_path, "tokens", "standard", 1, 3.0)
    for rate in study.learning_rates:
        write_run(tmp_path, "tuning", "hybrid", 9, math.inf, iterations=40, rate=rate)
    assert read_results(tmp_path).missing() == [
        "tiny, choosing a learning rate: standard (2), parallel (3), ladder (3)",
        "tiny: the step times of standard, parallel, ladder",
        "tiny, equal tokens: standard (2), parallel (3), ladder (3)",
        "tiny, equal time: parallel (3), ladder (3)",
    ]


def test_a_missing_study_and_invalid_results_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no study\.json"):
        read_results(tmp_path)
    write_study(tmp_path, made_up_study())
    for seed in (1, 2):
        write_run(tmp_path, "tokens", "ladder", seed, 3.0)
    for path in tmp_path.glob(f"trials/*/{RESULT_NAME}"):
        path.write_text(json.dumps({"trial": {}}))
    with pytest.raises(UserError) as caught:
        read_results(tmp_path)
    assert len(caught.value.messages) == 2
