"""Results from complete and interrupted records."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ladder_lab.study.outcome import (
    _merge_starts,
    read_history,
    remove_checkpoints,
    remove_unevaluated_end,
    result_of,
)
from ladder_lab.study.schema import RESULT_NAME, Trial, read_result, write_json
from tests.unit.ladder_lab.study.standing_in import SIZE, write_record

TRIAL = Trial("tokens", "ladder", SIZE, 1, 1e-3, 40)


def start(iteration: int) -> dict[str, Any]:
    return {"event": "start", "iteration": iteration, "versions": {"torch": "2"}}


def progress(iteration: int, loss: float, speed: float = 100.0) -> dict[str, Any]:
    return {
        "event": "progress",
        "iteration": iteration,
        "steps": 10,
        "seconds": 2.0,
        "loss": loss,
        "tokens_per_second": speed,
    }


def evaluation(iteration: int, loss: float | str) -> dict[str, Any]:
    return {"event": "evaluation", "iteration": iteration, "loss": loss}


CUT_OFF = [
    start(0),
    progress(10, 5.0),
    progress(20, 4.0),
    evaluation(20, 4.1),
    progress(30, 3.0),
    evaluation(30, 3.1),
    # Killed; the last checkpoint has step 25. Killed again; that checkpoint is damaged, and the one before has step 22.
    start(25),
    {**progress(30, 2.9), "steps": 5, "seconds": 1.0},
    evaluation(30, 2.8),
    start(22),
    {**progress(30, 2.7), "steps": 8, "seconds": 1.6},
    evaluation(30, 2.6),
    progress(40, 2.5, 300.0),
]


def test_lost_steps_are_dropped() -> None:
    history = _merge_starts([*CUT_OFF, evaluation(40, 2.4), {"event": "stop", "code": 0}])
    result = result_of(TRIAL, history, 7, 64, ("python",))
    assert result is not None
    # Two of the steps 21 to 30 are kept, with two tenths of their time.
    assert result.training == ((10, 5.0), (20, 4.0), (22, 3.0), (30, 2.7), (40, 2.5))
    assert result.seconds == pytest.approx(2 + 2 + 0.4 + 1.6 + 2)
    assert result.validation == ((20, 4.1), (30, 2.6), (40, 2.4))
    assert (result.attempts, result.tokens_per_second, result.final_loss) == (3, 100.0, 2.4)
    assert result.versions["torch"] == "2" and "python" in result.versions


@pytest.mark.parametrize("events", [[], CUT_OFF, [*CUT_OFF, {"event": "stop", "code": 0, "reason": "SIGTERM"}]])
def test_a_trial_without_its_last_evaluation_is_not_done(events: list[dict[str, Any]]) -> None:
    assert result_of(TRIAL, _merge_starts(events), 7, 64, ()) is None


def test_bad_numbers_are_an_infinite_loss_only_in_tuning() -> None:
    history = _merge_starts([*CUT_OFF, {"event": "stop", "code": 3}])
    assert result_of(TRIAL, history, 7, 64, ()) is None
    tuning = result_of(Trial("tuning", "ladder", SIZE, 1, 1e-3, 40), history, 7, 64, ())
    assert tuning is not None and tuning.final_loss == math.inf
    again = _merge_starts([*CUT_OFF, {"event": "stop", "code": 3}, start(30)])
    assert again.code is None


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    history = _merge_starts([*CUT_OFF, evaluation(40, "nan")])
    result = result_of(TRIAL, history, 7, 64, ("python", "x"))
    assert result is not None and result.final_loss == math.inf
    write_json(tmp_path / RESULT_NAME, result)
    assert read_result(tmp_path) == result
    json.loads((tmp_path / "result.json").read_text(), parse_constant=lambda word: pytest.fail(word))


def save(folder: Path, iteration: int) -> None:
    path = folder / "checkpoints" / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    (path / "weights").write_text("w")
    (folder / "checkpoints" / "latest").write_text(path.name + "\n")


def test_a_run_interrupted_before_its_last_evaluation_resumes_from_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 20)
    save(tmp_path, 40)
    assert remove_unevaluated_end(tmp_path, 41) == []
    assert remove_unevaluated_end(tmp_path, 40) == ["iter_0000040"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "iter_0000020\n"
    assert remove_unevaluated_end(tmp_path, 20) == ["iter_0000020"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_record_of_a_finished_trial_stays(tmp_path: Path) -> None:
    write_record(tmp_path, *CUT_OFF)
    save(tmp_path, 40)
    remove_checkpoints(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["run.jsonl"]
    assert read_history(tmp_path).iteration == 40 and read_history(tmp_path / "none").starts == 0
