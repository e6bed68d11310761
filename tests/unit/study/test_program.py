"""A whole study with stand-ins for its trainings: what it runs, what it keeps, and how it goes on."""

import io
import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ladder.errors import UserError
from megatron_ladder.study import program, scheduling
from megatron_ladder.study.description import read_study
from megatron_ladder.study.material import Material
from megatron_ladder.study.options import Request, RunOptions
from megatron_ladder.study.progress import GridProgress, Position
from megatron_ladder.study.trial import Trial, read_result
from tests.unit.study.standing_in import SIZE, step_times, study_of, trainer, write_record

BASE = {"standard": 3.0, "ladder": 3.1}


def usual(trial: Trial) -> dict[str, Any]:
    """The higher learning rate of the two that are asked for is the best one."""
    return {"loss": BASE[trial.wiring] + abs(trial.learning_rate - 2e-3)}


class Stand:
    """A study of stand-ins, and what it has started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options = RunOptions(
            folder, wirings=tuple(BASE), timed_wirings=("standard", "ladder"), sizes=(SIZE,), seeds=(1, 2),
            iterations=10, tuning_iterations=4, learning_rates=(1e-3, 2e-3), seq_length=16, micro_batch_size=1,
            global_batch_size=4,
        )  # fmt: skip
        self.behaviour: Callable[[Trial], dict[str, Any]] = usual
        self.started: list[str] = []
        self.reports: list[Path] = []
        monkeypatch.setattr(scheduling, "POLL_SECONDS", 0.01)
        monkeypatch.setattr(program, "prepare_material", lambda request: Material((), "words"))
        monkeypatch.setattr(program, "write_report", lambda folder, output: self.reports.append(output))
        monkeypatch.setattr(program, "training_command", self._command)
        monkeypatch.setattr(program.StudyRun, "_time_steps", self._time_steps)
        original = program.StudyRun._job

        def job(run: Any, trial: Trial) -> Any:
            self.started.append(trial.name)
            return original(run, trial)

        monkeypatch.setattr(program.StudyRun, "_job", job)

    def _command(self, request: Request, data: Any, trial: Trial, ranks: int) -> tuple[str, ...]:
        save = self.options.output_dir / "trials" / trial.name / "checkpoints"
        return trainer(save, trial.iterations, **self.behaviour(trial))

    @staticmethod
    def _time_steps(run: Any, size: str) -> None:
        if size not in run.study.step_times:
            times = step_times(standard=1.0, ladder=1.5)
            run._update(replace(run.study, step_times={size: times}))

    def run(self) -> None:
        self.started = []
        program.run_study(Request(self.options, ()), ["run"])

    def result(self, start: str) -> Any:
        (folder,) = [path for path in (self.options.output_dir / "trials").iterdir() if path.name.startswith(start)]
        return read_result(folder)


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path / "study", monkeypatch)


def test_a_study_is_done_once(stand: Stand) -> None:
    stand.run()
    # 2 wirings x 2 rates and 2 further ones, 2 x 2 seeds at equal tokens, ladder x 2 seeds at equal time.
    kinds = [name.split("-")[0] for name in stand.started]
    assert kinds == ["tuning"] * 6 + ["tokens"] * 4 + ["time"] * 2
    assert sorted("lr0.004" in name for name in stand.started[4:6]) == [True, True]
    study = read_study(stand.options.output_dir)
    assert study is not None and set(study.chosen.values()) == {2e-3}
    assert stand.result(f"time-{SIZE}-ladder-seed2").trial.iterations == 15
    assert stand.reports == [stand.options.output_dir]
    stand.run()
    assert stand.started == []


def test_what_is_done_is_left_out_and_what_is_not_goes_on(stand: Stand) -> None:
    stand.options = replace(stand.options, learning_rates=(2e-3,))
    stand.run()
    trials = stand.options.output_dir / "trials"
    (redone,) = trials.glob("tokens-*-ladder-seed2-*")
    (redone / "result.json").unlink()
    (redone / "checkpoints" / "run.jsonl").unlink()
    # Killed between the end of its training and its result: nothing is trained again.
    (recorded,) = trials.glob("tokens-*-standard-seed1-*")
    (recorded / "result.json").unlink()
    stand.run()
    assert stand.started == [redone.name]
    assert read_result(redone) is not None and read_result(recorded) is not None


def test_a_failed_trial_is_told_and_the_others_go_on(stand: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    def behaviour(trial: Trial) -> dict[str, Any]:
        fails = (trial.kind, trial.wiring, trial.seed) == ("tokens", "ladder", 1)
        return {**usual(trial), "code": 7 if fails else 0}

    stand.behaviour = behaviour
    stand.options = replace(stand.options, learning_rates=(2e-3,))
    with pytest.raises(SystemExit) as caught:
        stand.run()
    told = capfd.readouterr()
    assert caught.value.code == 1 and len(stand.started) == 6
    assert "ladder-seed1" in told.err and "exit code 7" in told.err and "output.txt" in told.err
    assert "went wrong" in told.out
    assert len(stand.reports) == 1
    stand.behaviour = usual
    stand.run()
    assert len(stand.started) == 1


def test_a_learning_rate_that_diverges_loses_and_is_no_failure(stand: Stand) -> None:
    stand.behaviour = lambda trial: {
        **usual(trial), "code": 3 if trial.learning_rate > 1e-3 or trial.wiring == "ladder" else 0
    }  # fmt: skip
    with pytest.raises(SystemExit):
        stand.run()
    study = read_study(stand.options.output_dir)
    # ladder diverges with all of them, and is trained no further.
    assert study is not None and study.chosen == {f"{SIZE}/standard": 1e-3}
    assert [name.split("-it")[0] for name in stand.started[4:]] == [
        f"tuning-{SIZE}-standard-seed100-lr0.0005",
        f"tokens-{SIZE}-standard-seed1-lr0.001", f"tokens-{SIZE}-standard-seed2-lr0.001",
    ]  # fmt: skip


def test_a_signal_stops_it_and_it_goes_on_afterwards(stand: Stand, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    stand.options = replace(stand.options, learning_rates=(2e-3,))
    stand.behaviour = lambda trial: {**usual(trial), "seconds": 60.0}

    def tick(progress: GridProgress, running: list[Trial]) -> None:
        records = [stand.options.output_dir / "trials" / one.name / "checkpoints/run.jsonl" for one in running]
        while not all(record.exists() and "progress" in record.read_text() for record in records):
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(GridProgress, "tick", tick)
    stand.run()
    told = capfd.readouterr().out
    assert "0 of about 6 trials are done" in told and "goes on from here" in told
    assert told.count(": stopped") == 2 and "failed" not in told
    assert stand.reports == [] and not list(stand.options.output_dir.rglob("result.json"))
    stand.behaviour = usual
    monkeypatch.undo()
    again = Stand(stand.options.output_dir, monkeypatch)
    again.options = stand.options
    again.run()
    assert len(again.started) == 6
    assert again.result(f"tokens-{SIZE}-standard-seed1").attempts == 2


def test_another_study_is_refused_by_what_differs(tmp_path: Path) -> None:
    program.settle(tmp_path, study_of())
    done = replace(study_of(), chosen={"a/b": 1e-3})
    program.write_study(tmp_path, done)
    # What no result follows from may change.
    assert program.settle(tmp_path, study_of(machine={"cores": "64"}, command=("x",))) == done
    with pytest.raises(UserError) as caught:
        program.settle(tmp_path, study_of(seeds=(1, 2, 3), training_flags=(), link="2c"))
    assert len(caught.value.mistakes) == 3
    assert "seeds: was [1, 2], now asked for [1, 2, 3]" in caught.value.mistakes[0]


def test_a_folder_has_one_study_at_a_time(stand: Stand) -> None:
    stand.options.output_dir.mkdir()
    with (
        program.SaveLock(stand.options.output_dir, flag="--output-dir"),
        pytest.raises(UserError, match="--output-dir .*: another run writes there"),
    ):
        stand.run()


def test_progress_is_of_the_whole_grid(tmp_path: Path) -> None:
    trials = [Trial("tokens", "ladder", SIZE, seed, 1e-3, 100) for seed in (1, 2, 3, 4)]
    at = {trial.name: 0 for trial in trials}
    now = 0.0
    out = io.StringIO()
    progress = GridProgress(
        lambda trial: 10.0, lambda trial: Position(at[trial.name], 2.5, 99.0), out, lambda: now, expected=trials
    )
    at[trials[0].name] = 50
    for trial in trials[:2]:
        progress.starts(trial)
    now, at[trials[0].name] = 100.0, 100
    progress.ends(trials[0], "well")
    at[trials[1].name] = 50
    # Half a trial before this start and none of the second: in 100 s one trial's worth; two and a half are left.
    assert progress.status([trials[1]]) == (
        "1/4 trials | tokens ladder seed 2 lr 0.001: 50/100, loss 2.500, 99 tokens/s | 0:01:40 so far | 0:04:10 left"
    )
    progress.tick([trials[1]])
    progress.tick([trials[1]])
    assert len(out.getvalue().splitlines()) == 2 and out.getvalue().startswith("[1/4] tokens-")


def test_a_trial_cut_off_before_its_last_evaluation_does_its_last_steps_again(stand: Stand) -> None:
    stand.options = replace(stand.options, learning_rates=(2e-3,))
    stand.run()
    (folder,) = (stand.options.output_dir / "trials").glob("tokens-*-ladder-seed2-*")
    (folder / "result.json").unlink()
    write_record(folder, {"event": "start", "iteration": 0})
    for iteration in (5, 10):
        (folder / "checkpoints" / f"iter_{iteration:07d}").mkdir()
    seen: list[list[str]] = []

    def behaviour(trial: Trial) -> dict[str, Any]:
        seen.append(sorted(path.name for path in (folder / "checkpoints").glob("iter*")))
        return usual(trial)

    stand.behaviour = behaviour
    stand.run()
    # Before the study looks at it, and when it is started.
    assert stand.started == [folder.name] and seen[:2] == [["iter_0000005", "iter_0000010"], ["iter_0000005"]]
    assert json.loads((folder / "result.json").read_text())["trial"]["seed"] == 2
