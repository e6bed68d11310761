"""Whole studies with fake training runs: their trials, files and resumption."""

import io
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ladder_lab.study import commands, program, scheduling
from ladder_lab.study.options import Request, RunOptions
from ladder_lab.study.scheduling import GridProgress
from ladder_lab.study.schema import Trial, load_or_create_study, read_result, read_study, write_study
from megatron_ladder import progress
from megatron_ladder.errors import UserError
from tests.unit.ladder_lab.study.standing_in import SIZE, study_of, trainer, write_record

BASE = {"standard": 3.0, "ladder": 3.1}


def usual(trial: Trial) -> dict[str, Any]:
    """Make the higher of the two learning rates the best one."""
    return {"loss": BASE.get(trial.wiring, 3.2) + abs(trial.learning_rate - 2e-3)}


BENCHMARK = """
import json, os, sys
output, timings = sys.argv[1], json.loads(sys.argv[2])
runs = os.path.dirname(output) + "/runs"
with open(runs, "a") as file:
    file.write(".")
rows = timings[min(os.path.getsize(runs), len(timings)) - 1]
if not rows:
    sys.exit(5)
with open(output, "w") as file:
    json.dump(rows, file)
"""
"""Writes the rows of its next run to a file."""


def benchmark_row(wiring: str, ratio: float) -> dict[str, Any]:
    """Return a row of the benchmark's JSON; a ratio above 9 is too noisy."""
    return {
        "wiring": wiring,
        "ratio_to_standard": ratio,
        "spread": 0.01,
        "median_seconds": 0.3 / ratio,
        "alpha": "1.2c",
        "verdict": "sound" if ratio < 9 else "too noisy to judge",
        "interconnect": "a wire",
        "alpha_seconds": 0.001,
    }


class Stand:
    """A study with fake training runs, and a list of the started ones."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options = RunOptions(
            folder,
            wirings=tuple(BASE),
            timed_wirings=("standard", "ladder"),
            sizes=(SIZE,),
            seeds=(1, 2),
            iterations=10,
            tuning_iterations=4,
            learning_rates=(1e-3, 2e-3),
            seq_length=16,
            micro_batch_size=1,
            global_batch_size=4,
        )
        self.behaviour: Callable[[Trial], dict[str, Any]] = usual
        self.started: list[str] = []
        self.reports: list[Path] = []
        monkeypatch.setattr(scheduling, "POLL_SECONDS", 0.01)
        monkeypatch.setattr(program, "_prepare_data", lambda request: (request, "words"))
        monkeypatch.setattr(program, "write_report", lambda results, output: self.reports.append(output))
        monkeypatch.setattr(commands, "training_command", self._command)
        self.timings: list[dict[str, float]] = [{"standard": 1.0, "ladder": 1.5}]
        """Ratios of successive benchmarks, of which the last one repeats; an empty one fails."""
        monkeypatch.setattr(commands, "timing_command", self._timing_command)
        original = program.StudyRun._job

        def job(run: Any, trial: Trial) -> Any:
            self.started.append(trial.name)
            return original(run, trial)

        monkeypatch.setattr(program.StudyRun, "_job", job)

    def _command(self, request: Request, trial: Trial, ranks: int) -> tuple[str, ...]:
        save = self.options.output_dir / "trials" / trial.name / "checkpoints"
        return trainer(save, trial.iterations, **self.behaviour(trial))

    def _timing_command(self, options: Any, study: Any, size: str, output: Path) -> tuple[str, ...]:
        """Return the command of a fake benchmark."""
        rows = [[benchmark_row(*ratio) for ratio in ratios.items()] for ratios in self.timings]
        return (sys.executable, "-I", "-S", "-c", BENCHMARK, str(output), json.dumps(rows), "--tp", "2")

    @property
    def timed(self) -> int:
        """Number of benchmark runs."""
        found = list(self.options.output_dir.glob("timing/*/runs"))
        return len(found[0].read_text()) if found else 0

    def run(self) -> None:
        self.started = []
        program.run_study(Request(self.options, ()))

    def result(self, start: str) -> Any:
        (folder,) = [path for path in (self.options.output_dir / "trials").iterdir() if path.name.startswith(start)]
        return read_result(folder)


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path / "study", monkeypatch)


def test_a_study_runs_once(stand: Stand) -> None:
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


@pytest.mark.parametrize(("given", "steps"), [(4, "it4"), (None, "it10")])
def test_rates_are_tuned_over_the_whole_run_by_default(stand: Stand, given: int | None, steps: str) -> None:
    stand.options = replace(stand.options, tuning_iterations=given)
    stand.run()
    assert {name.split("-")[-1] for name in stand.started if name.startswith("tuning")} == {steps}


def test_rates_of_a_smaller_model_are_scaled_to_the_hidden_size(stand: Stand, tmp_path: Path) -> None:
    stand.run()
    small = read_study(stand.options.output_dir)
    assert small is not None
    narrow = {size: {**shape, "hidden_size": shape["hidden_size"] // 2} for size, shape in small.sizes.items()}
    write_study(tmp_path, replace(small, sizes=narrow))
    stand.options = replace(
        stand.options, output_dir=tmp_path / "large", learning_rates_from=tmp_path, timed_wirings=("none",)
    )
    stand.run()
    assert [name.split("-lr")[1] for name in stand.started] == ["0.001-it10"] * 4
    write_study(tmp_path, small)
    with pytest.raises(UserError, match=r"study\.json: chosen: was .*0\.001.*, now .*0\.002"):
        stand.run()
    with pytest.raises(UserError, match=r"study\.json: learning rates: was \[\]"):
        stand.options = replace(stand.options, learning_rates_from=None)
        stand.run()


def test_rates_that_another_study_lacks_are_named(stand: Stand, tmp_path: Path) -> None:
    stand.options = replace(stand.options, learning_rates_from=tmp_path)
    with pytest.raises(UserError, match=f"--learning-rates-from {tmp_path}: not a study"):
        stand.run()
    write_study(tmp_path, study_of(chosen={f"{SIZE}/standard": 1e-3}, sizes={SIZE: {"hidden_size": 8}}))
    with pytest.raises(UserError, match="has chosen no rate for ladder: add these --wirings to that study"):
        stand.run()
    assert not stand.options.output_dir.exists()


def test_finished_trials_are_skipped(stand: Stand) -> None:
    stand.options = replace(stand.options, learning_rates=(2e-3,))
    stand.run()
    trials = stand.options.output_dir / "trials"
    (redone,) = trials.glob("tokens-*-ladder-seed2-*")
    (redone / "result.json").unlink()
    (redone / "checkpoints" / "run.jsonl").unlink()
    # Killed after training and before writing the result, so nothing is trained again.
    (recorded,) = trials.glob("tokens-*-standard-seed1-*")
    (recorded / "result.json").unlink()
    stand.run()
    assert stand.started == [redone.name]
    assert read_result(redone) is not None and read_result(recorded) is not None


def test_other_trials_continue_after_a_failure(stand: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    def behaviour(trial: Trial) -> dict[str, Any]:
        fails = (trial.kind, trial.wiring, trial.seed) == ("tokens", "ladder", 1)
        return {**usual(trial), "code": 7 if fails else 0}

    stand.behaviour = behaviour
    stand.options = replace(stand.options, learning_rates=(2e-3,))
    with pytest.raises(SystemExit) as caught:
        stand.run()
    printed = capfd.readouterr()
    assert caught.value.code == 1 and len(stand.started) == 6
    assert "ladder-seed1" in printed.err and "exit code 7" in printed.err and "output.txt" in printed.err
    assert "went wrong" in printed.out
    assert len(stand.reports) == 1
    stand.behaviour = usual
    stand.run()
    assert len(stand.started) == 1


def test_no_rate_is_chosen_before_all_are_tried(stand: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    """Otherwise a wiring whose tuning failed would later try more rates than the others."""
    stand.behaviour = lambda trial: {
        **usual(trial),
        "code": 7 if trial.wiring == "ladder" and trial.learning_rate < 2e-3 else 0,
    }
    with pytest.raises(SystemExit):
        stand.run()
    study = read_study(stand.options.output_dir)
    assert study is not None and study.chosen == {} and len(stand.started) == 4
    stand.behaviour = usual
    stand.run()
    # The failed trial, the further rates of both wirings, and all other trials.
    assert [name.split("-lr")[1] for name in stand.started[:3]] == ["0.001-it4", "0.004-it4", "0.004-it4"]
    assert len(stand.started) == 3 + 4 + 2
    capfd.readouterr()
    stand.run()
    assert stand.started == [] and "at the edge" not in capfd.readouterr().out


def test_kept_checkpoints_stay(stand: Stand) -> None:
    """A later start without --keep-checkpoints keeps them, because an adaptation may need them."""
    stand.options = replace(stand.options, learning_rates=(2e-3,), keep_checkpoints=True)
    stand.run()
    trials = stand.options.output_dir / "trials"
    for trial in trials.iterdir():
        (trial / "checkpoints" / "iter_0000010").mkdir()
    stand.options = replace(stand.options, keep_checkpoints=False)
    (redone,) = trials.glob("tokens-*-ladder-seed2-*")
    (redone / "result.json").unlink()
    stand.run()
    kept = {trial.name for trial in trials.iterdir() if (trial / "checkpoints" / "iter_0000010").is_dir()}
    assert kept == {trial.name for trial in trials.iterdir()} - {redone.name}


def test_doubtful_step_times_are_measured_again(stand: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    stand.options = replace(stand.options, learning_rates=(2e-3,))
    stand.timings = [{"standard": 1.0, "ladder": 9.5}, {"standard": 1.0, "ladder": 1.4}]
    stand.run()
    study = read_study(stand.options.output_dir)
    assert study is not None and stand.timed == 2
    times = study.step_times[SIZE]
    assert times.speedup == {"standard": 1.0, "ladder": 1.4} and "doubt" not in times.interconnect
    assert stand.result(f"time-{SIZE}-ladder-seed1").trial.iterations == 14
    assert "***" not in capfd.readouterr().out


def test_step_times_that_stay_doubtful_are_reported(stand: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    stand.options = replace(stand.options, learning_rates=(2e-3,))
    stand.timings = [{"standard": 1.0, "ladder": 9.5}]
    # The study still finishes.
    stand.run()
    study = read_study(stand.options.output_dir)
    assert study is not None and "in doubt" in study.step_times[SIZE].interconnect
    assert "too noisy to judge, in 3 attempts ***" in capfd.readouterr().out


def test_step_times_of_other_numbers_of_ranks_are_not_mixed(stand: Stand) -> None:
    stand.run()
    before = read_study(stand.options.output_dir)
    wirings = ("standard", "ladder", "parallel")
    stand.options = replace(stand.options, timing_ranks=4, wirings=wirings, timed_wirings=wirings)
    with pytest.raises(UserError, match="--timing-ranks 4: the step times of this study were measured with 2"):
        stand.run()
    assert stand.started == [] and read_study(stand.options.output_dir) == before


def test_without_step_times_there_is_no_equal_time(stand: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    stand.options = replace(stand.options, learning_rates=(2e-3,))
    stand.timings = [{}]
    with pytest.raises(SystemExit):
        stand.run()
    assert "exit code 5" in capfd.readouterr().err and len(stand.started) == 4
    stand.timings = [{"standard": 1.0, "ladder": 1.5}]
    stand.run()
    assert [name.split("-")[0] for name in stand.started] == ["time"] * 2


def test_own_step_times_are_taken_once_from_all_trials(stand: Stand) -> None:
    """All fake runs do 15 tokens per second, so runs at equal time are those at equal tokens."""
    stand.options = replace(stand.options, learning_rates=(2e-3,), link="own")
    stand.behaviour = lambda trial: {**usual(trial), "code": 7 if trial.seed == 2 and trial.wiring == "ladder" else 0}
    with pytest.raises(SystemExit):
        stand.run()
    study = read_study(stand.options.output_dir)
    assert study is not None and study.step_times == {} and stand.timed == 0
    stand.behaviour = usual
    stand.run()
    study = read_study(stand.options.output_dir)
    assert study is not None and study.step_times[SIZE].speedup == {"standard": 1.0, "ladder": 1.0}


def test_a_diverging_learning_rate_is_not_a_failure(stand: Stand) -> None:
    stand.behaviour = lambda trial: {
        **usual(trial),
        "code": 3 if trial.learning_rate > 1e-3 or trial.wiring == "ladder" else 0,
    }
    with pytest.raises(SystemExit):
        stand.run()
    study = read_study(stand.options.output_dir)
    # ladder diverges with all of them, and is not trained further.
    assert study is not None and study.chosen == {f"{SIZE}/standard": 1e-3}
    assert [name.split("-it")[0] for name in stand.started[4:]] == [
        f"tuning-{SIZE}-standard-seed100-lr0.0005",
        f"tokens-{SIZE}-standard-seed1-lr0.001",
        f"tokens-{SIZE}-standard-seed2-lr0.001",
    ]


def test_a_study_resumes_after_a_signal(stand: Stand, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    stand.options = replace(stand.options, learning_rates=(2e-3,))
    stand.behaviour = lambda trial: {**usual(trial), "seconds": 60.0}

    def update(grid: GridProgress, running: list[Trial]) -> None:
        records = [stand.options.output_dir / "trials" / one.name / "checkpoints/run.jsonl" for one in running]
        while not all(record.exists() and "progress" in record.read_text() for record in records):
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(GridProgress, "update", update)
    stand.run()
    printed = capfd.readouterr().out
    assert "0 of about 6 trials are done" in printed and "command resumes the study" in printed
    assert printed.count(": stopped") == 2 and "failed" not in printed
    assert stand.reports == [] and not list(stand.options.output_dir.rglob("result.json"))
    stand.behaviour = usual
    monkeypatch.undo()
    again = Stand(stand.options.output_dir, monkeypatch)
    again.options = stand.options
    again.run()
    assert len(again.started) == 6
    assert again.result(f"tokens-{SIZE}-standard-seed1").attempts == 2


def test_other_settings_are_rejected(tmp_path: Path) -> None:
    load_or_create_study(tmp_path, study_of())
    done = replace(study_of(), chosen={"a/b": 1e-3})
    write_study(tmp_path, done)
    # Fields on which no result depends can change.
    assert load_or_create_study(tmp_path, study_of(machine={"cores": "64"}, command=("x",))) == done
    with pytest.raises(UserError) as caught:
        load_or_create_study(tmp_path, study_of(seeds=(1, 3), training_flags=(), link="2c"))
    assert len(caught.value.messages) == 3
    assert "seeds: was [1, 2], now [1, 3]" in caught.value.messages[0]
    assert caught.value.messages[0].endswith("or the same settings and further ones")


def test_rates_of_another_study_stay_when_wirings_are_added(tmp_path: Path) -> None:
    few, more = {"a/standard": 1e-3}, {"a/standard": 1e-3, "a/ladder": 2e-3}
    load_or_create_study(tmp_path, study_of(learning_rates=(), wirings=("standard",), chosen=few))
    extended = load_or_create_study(tmp_path, study_of(learning_rates=(), wirings=("standard", "ladder"), chosen=more))
    assert extended.chosen == more and read_study(tmp_path) == extended
    with pytest.raises(UserError, match="chosen: was"):
        load_or_create_study(tmp_path, replace(extended, chosen={**more, "a/ladder": 4e-3}))


def test_wirings_and_seeds_can_be_added(stand: Stand) -> None:
    stand.options = replace(stand.options, wirings=("standard",), timed_wirings=("none",))
    stand.run()
    assert stand.timed == 0
    stand.options = replace(stand.options, wirings=("standard", "ladder"), timed_wirings=("standard", "ladder"))
    stand.run()
    # 2 rates and a further one, 2 seeds at equal tokens, and at equal time.
    assert [name.split("-")[0] for name in stand.started] == ["tuning"] * 3 + ["tokens"] * 2 + ["time"] * 2
    assert all("ladder" in name for name in stand.started) and stand.timed == 1
    # The length of a finished run at equal time never changes.
    stand.timings = [{"standard": 1.0, "ladder": 2.0, "parallel": 1.2}]
    stand.options = replace(
        stand.options,
        wirings=("standard", "parallel", "ladder"),
        seeds=(1, 2, 3),
        timed_wirings=("standard", "ladder", "parallel"),
    )
    stand.run()
    study = read_study(stand.options.output_dir)
    assert study is not None and stand.timed == 2
    times = study.step_times[SIZE]
    assert times.speedup == {"standard": 1.0, "ladder": 1.5, "parallel": 1.2}
    assert times.interconnect.count("a wire") == 2 and "; for parallel: a wire" in times.interconnect
    assert len(times.later_commands) == 1
    assert not any("ladder-seed1" in name or "ladder-seed2" in name for name in stand.started)
    assert [name for name in stand.started if name.startswith("time") and "ladder" in name and "it15" in name] != []
    stand.run()
    assert stand.started == [] and stand.timed == 2


def test_a_folder_has_one_study_at_a_time(stand: Stand) -> None:
    stand.options.output_dir.mkdir()
    with (
        program.SaveLock(stand.options.output_dir, flag="--output-dir"),
        pytest.raises(UserError, match="--output-dir .*: another run writes there"),
    ):
        stand.run()


def test_progress_covers_the_whole_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr(scheduling, "UPDATE_SECONDS", 0.0)
    trials = [Trial("tokens", "ladder", SIZE, seed, 1e-3, 100) for seed in (1, 2, 3, 4)]
    at = dict.fromkeys((trial.name for trial in trials), 0)
    out = io.StringIO()
    grid = GridProgress(lambda trial: (at[trial.name], 2.5), out)
    grid.expected = trials
    at[trials[0].name] = 50
    for trial in trials[:2]:
        grid.start(trial)
    at[trials[0].name], at[trials[1].name] = 100, 40
    grid.end(trials[0], "well")
    grid.update([trials[1]])
    first, *_, last = out.getvalue().splitlines()
    assert first == f"[1/4] {trials[0].name}: well"
    # This start did half of the first trial and 40 steps of the second; 260 steps are left.
    assert last.startswith("study:  26% 90/350 ")
    assert "trials=1/4, tokens ladder seed 2=40/100 (loss 2.500)" in last
    at[trials[1].name] = 100
    grid.end(trials[1], "well")
    grid.close()
    assert out.getvalue().splitlines()[-1].startswith("study:  43% 150/350 ")


def test_a_trial_interrupted_before_its_last_evaluation_repeats_its_last_steps(stand: Stand) -> None:
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
    # When the study collects it, and when it is started.
    assert stand.started == [folder.name] and seen[:2] == [["iter_0000005", "iter_0000010"], ["iter_0000005"]]
    assert json.loads((folder / "result.json").read_text())["trial"]["seed"] == 2
