"""Runs a study, from its command line to its report, and resumes it."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.config.run import RunConfig
from megatron_ladder.errors import ExitCode
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.study.command_line import timed_wirings
from megatron_ladder.lab.study.commands import (
    SHAPE_FIELDS,
    common_flags,
    environment_of,
    folder_of,
    read_training_flags,
    resolve_trial,
    timing_command,
    training_command,
)
from megatron_ladder.lab.study.data import StudyData, describe_machine, prepare_data
from megatron_ladder.lab.study.description import Study, load_or_create_study, write_study
from megatron_ladder.lab.study.grid import (
    at_the_edge,
    choose_learning_rates,
    expected_trials,
    further_trials,
    rate_key,
    time_trials,
    token_trials,
    tuning_trials,
)
from megatron_ladder.lab.study.options import OWN_LINK, Request
from megatron_ladder.lab.study.outcome import (
    read_history,
    read_step_times,
    remove_checkpoints,
    remove_unevaluated_end,
    result_of,
    times_of_trials,
    write_result,
)
from megatron_ladder.lab.study.report import print_report_path, write_report
from megatron_ladder.lab.study.scheduling import GridProgress, Job, Pool, TrialPosition
from megatron_ladder.lab.study.trial import Result, Trial, read_result
from megatron_ladder.processes import received_signals
from megatron_ladder.train.lock import SaveLock

OUTPUT_NAME = "output.txt"
LAST_LINES = 12
"""Lines of a failed trial's output to print."""
TIMING_ATTEMPTS = 3
"""Most measurements of step times until the benchmark finds them sound."""


class _StudyStopped(Exception):
    """A signal requested the end."""


def run_study(
    request: Request,
    argv: Sequence[str],
    start: "Callable[[Request, StudyData, Study, Sequence[int]], StudyRun] | None" = None,
    report: Callable[[Path, Path], Path | None] | None = None,
) -> None:
    """Run the missing trials of a study, and write its report.

    Args:
        argv: the command line, for the record.
        start: creates the run; by default of the whole grid.
        report: writes a report of the first folder into the second and returns its path; by default that of the grid.

    Raises:
        UserError: the folder has another study, or another process runs it.
        SystemExit: trials have failed, and were reported.
    """
    options = request.options
    options.output_dir.mkdir(parents=True, exist_ok=True)
    with SaveLock(options.output_dir, flag="--output-dir"), received_signals() as received:
        data = prepare_data(request)
        study = load_or_create_study(options.output_dir, _describe(request, data, argv))
        run = (start or StudyRun)(request, data, study, received)
        try:
            run.run()
        except _StudyStopped:
            done, expected = len(run.progress.done), len(run.progress.expected)
            run.progress.say(
                f"stopped: {done} of about {expected} trials are done, and the running ones were saved; the same "
                "command resumes the study"
            )
            return
        finally:
            run.progress.close()
        if any(result.trial.kind == "tokens" for result in run.results.values()):
            print_report_path((report or write_report)(options.output_dir, options.report_dir or options.output_dir))
    if run.failures:
        print(f"error: {len(run.failures)} parts of the study failed:", file=sys.stderr)
        for failure in run.failures:
            print(f"error: {failure}", file=sys.stderr)
        print("error: the same command runs them again", file=sys.stderr, flush=True)
        sys.exit(ExitCode.INTERNAL)


def _describe(request: Request, data: StudyData, argv: Sequence[str]) -> Study:
    """Return the requested study, before any trial."""
    options = request.options
    first = Trial("tokens", options.wirings[0], options.sizes[0], 0, options.learning_rates[0], options.iterations)
    return Study(
        wirings=options.wirings,
        timed_wirings=timed_wirings(options),
        sizes={size: {name: getattr(find_size(size), name) for name in SHAPE_FIELDS} for size in options.sizes},
        seeds=options.seeds,
        tuning_seed=options.tuning_seed,
        learning_rates=options.learning_rates,
        iterations=options.iterations,
        tuning_iterations=options.tuning_iterations,
        tokens_per_step=resolve_trial(request, data.flags, first, []).tokens_per_step,
        seq_length=options.seq_length,
        link=options.link,
        training_flags=common_flags(request),
        data=data.description,
        machine=describe_machine(),
        command=("python", "tools/study.py", *argv),
        schedule={"warm_up": options.warm_up_share, "last": options.last_rate_share},
    )


class StudyRun:
    """One start of a study.

    Attributes:
        failures: one message per failed part.
        results: finished trials by name.
    """

    def __init__(self, request: Request, data: StudyData, study: Study, received: Sequence[int]) -> None:
        self.request = request
        self.options = request.options
        self.data = data
        self.study = study
        self.failures: list[str] = []
        self.results: dict[str, Result] = {}
        self.progress = GridProgress(self._position)
        self._pool = Pool(self.options.jobs, received)
        self._received = received
        self._resolved: dict[tuple[str, str], RunConfig] = {}
        self._further: list[Trial] = []
        parallel = read_training_flags(request.training_flags, []).parallel
        self._processes = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        self._tensor_parallel = parallel.tensor_model_parallel_size

    def run(self) -> None:
        """Run all missing trials, in order.

        Raises:
            _StudyStopped: a signal arrived.
        """
        self._update(self.study)
        self._tune(tuning_trials(self.study))
        if self.failures:
            # Otherwise some wirings would have tried fewer rates than others.
            return
        self._choose()
        if self.options.link != OWN_LINK:
            for size in self.study.sizes:
                self._time_steps(size)
        self._train(token_trials(self.study))
        if self.options.link == OWN_LINK and self.study.timed_wirings:
            for size in self.study.sizes:
                self._take_own_times(size)
        self._train(time_trials(self.study))

    def _update(self, study: Study) -> None:
        """Save a change of the study."""
        if study is not self.study:
            write_study(self.options.output_dir, study)
        self.study = study
        self.progress.expected = [*expected_trials(study), *self._further]

    def _tune(self, trials: Sequence[Trial]) -> None:
        """Run the tuning trials, and further ones while a best learning rate is at the edge."""
        self._train(trials)
        while not self.failures and (further := further_trials(self.study, self._losses())):
            self._further += further
            self.progress.expected = [*self.progress.expected, *further]
            self._train(further)

    def _losses(self) -> dict[Trial, float]:
        return {result.trial: result.final_loss for result in self.results.values()}

    def _choose(self) -> None:
        study, losses = self.study, self._losses()
        # Earlier choices stay, because trials were trained with them.
        before = study.chosen
        chosen = {**choose_learning_rates(study, losses), **before}
        self._update(replace(study, chosen=chosen))
        keys = [rate_key(size, wiring) for size in study.sizes for wiring in study.wirings]
        lacking = [key for key in keys if key not in chosen]
        self.failures += [f"{key}: every learning rate diverged: not trained further" for key in lacking]
        if len(study.learning_rates) > 1:
            self.progress.say(f"learning rates: {', '.join(f'{key} {rate:g}' for key, rate in chosen.items())}")
            for key in set(at_the_edge(self.study, losses)) - set(before):
                self.progress.say(f"*** {key}: {chosen[key]:g} is at the edge of the rates tried ***")

    def _train(self, trials: Sequence[Trial]) -> None:
        by_name = {trial.name: trial for trial in trials}
        left = [trial for trial in trials if not self._collect(trial)]
        jobs = (self._job(trial) for trial in left)

        def on_end(job: Job, code: int) -> None:
            self._finish(by_name[job.name], job, code)

        def on_poll(running: Sequence[Job]) -> None:
            self.progress.update([by_name[job.name] for job in running])

        if not self._pool.run(jobs, on_end, on_poll):
            raise _StudyStopped

    def _job(self, trial: Trial) -> Job:
        folder = folder_of(self.options, trial)
        for name in remove_unevaluated_end(folder, trial.iterations):
            self.progress.say(f"{trial.name}: removed {name}: interrupted before the last evaluation")
        self.progress.start(trial)
        return Job(
            trial.name, self._command(trial), environment_of(self.options), folder / OUTPUT_NAME, self._slots(trial)
        )

    def _command(self, trial: Trial) -> tuple[str, ...]:
        return training_command(self.request, self.data.flags, trial, self._ranks(trial))

    def _ranks(self, trial: Trial) -> int:
        run = self._run_of(trial)
        return run.parallel.tensor_model_parallel_size * run.parallel.pipeline_model_parallel_size

    def _slots(self, trial: Trial) -> int:
        return 1 if self.options.launcher is not None else self._ranks(trial)

    def _run_of(self, trial: Trial) -> RunConfig:
        """Return the configuration of a trial, except for seed, learning rate and length."""
        key = (trial.size, trial.wiring)
        if key not in self._resolved:
            self._resolved[key] = resolve_trial(self.request, self.data.flags, trial, [])
        return self._resolved[key]

    def _collect(self, trial: Trial) -> bool:
        """Return whether a trial is done. If so, store its result and remove its checkpoints."""
        folder = folder_of(self.options, trial)
        result = read_result(folder)
        if result is None:
            run = self._run_of(trial)
            parameters = parameter_count(run.model).total
            result = result_of(trial, read_history(folder), parameters, run.tokens_per_step, self._command(trial))
            if result is None:
                return False
            # Only here, because a later start can have another --keep-checkpoints.
            if trial.kind == "tuning" or not self.options.keep_checkpoints:
                remove_checkpoints(folder)
            write_result(folder, result)
        self.results[trial.name] = result
        self.progress.done.add(trial.name)
        return True

    def _finish(self, trial: Trial, job: Job, code: int) -> None:
        """Report the outcome of a job that has ended."""
        if self._collect(trial):
            result = self.results[trial.name]
            text = f"validation loss {result.final_loss:.4f}, {result.tokens_per_second:,.0f} tokens/s"
            self.progress.end(trial, f"{text}, {result.seconds:,.0f} s")
            return
        if self._received:
            self.progress.end(trial, "stopped", is_done=False)
            return
        reason = f"exit code {code}" if code else "no validation loss of the last step: add validation data"
        self.progress.end(trial, f"failed: {reason}; the end of {job.output}:\n{_last_lines(job.output)}", False)
        self.failures.append(f"{trial.name}: {reason}: see {job.output}")

    def _time_steps(self, size: str) -> None:
        """Measure the step times of a size, with no other job, unless they are known or not needed."""
        if size in self.study.step_times or not self.study.timed_wirings:
            return
        folder = self.options.output_dir / "timing" / size
        rows, output = folder / "rows.json", folder / OUTPUT_NAME
        command = timing_command(self.options, self.study, size, rows)
        job = Job(f"step times of {size}", command, environment_of(self.options), output, self.options.jobs)
        codes: list[int] = []
        doubts: list[str] = []
        for _ in range(TIMING_ATTEMPTS):
            rows.unlink(missing_ok=True)
            self.progress.say(f"{job.name}: measuring with {self.options.link}")
            if not self._pool.run([job], lambda _, code: codes.append(code)):
                raise _StudyStopped
            if not rows.is_file():
                self.failures.append(f"{job.name}: exit code {codes[-1]}: see {output}; no trials at equal time")
                self.progress.say(f"{job.name}: failed:\n{_last_lines(output)}")
                return
            times, doubts = read_step_times(rows, self.study, size, command)
            if not doubts:
                break
        for doubt in doubts:
            self.progress.say(f"*** step times: {doubt}, in {TIMING_ATTEMPTS} attempts ***")
        ratios = ", ".join(f"{wiring} {ratio:.3f}" for wiring, ratio in times.speedup.items())
        self.progress.say(f"{job.name}: {times.interconnect}: standard over wiring: {ratios}")
        self._update(replace(self.study, step_times={**self.study.step_times, size: times}))

    def _take_own_times(self, size: str) -> None:
        """Take step times from the trials at equal tokens after all have finished, so that they never change."""
        timed = [
            trial
            for trial in token_trials(self.study)
            if trial.size == size and trial.wiring in self.study.timed_wirings
        ]
        if size in self.study.step_times or any(trial.name not in self.results for trial in timed):
            return
        times = times_of_trials(list(self.results.values()), self.study, size, self._tensor_parallel)
        if times is not None:
            self._update(replace(self.study, step_times={**self.study.step_times, size: times}))

    def _position(self, trial: Trial) -> TrialPosition:
        if trial.name in self.results:
            return TrialPosition(trial.iterations, None)
        history = read_history(folder_of(self.options, trial))
        return TrialPosition(history.iteration, float(history.progress[-1]["loss"]) if history.progress else None)


def _last_lines(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(f"    {line}" for line in lines)
