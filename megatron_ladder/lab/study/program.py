"""Runs a study: from its command line to its report, and on from where it was stopped."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.checkpoint.publish import write_whole
from megatron_ladder.config.run import RunConfig
from megatron_ladder.errors import ExitCode, UserError
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.study.adapt_report import write_adaptation
from megatron_ladder.lab.study.command_line import timed_wirings
from megatron_ladder.lab.study.commands import (
    common_flags,
    environment_of,
    folder_of,
    read_training_flags,
    resolve_trial,
    training_command,
)
from megatron_ladder.lab.study.description import STUDY_NAME, Study, read_study
from megatron_ladder.lab.study.grid import (
    at_the_edge,
    choose_learning_rates,
    expected_trials,
    further_trials,
    key_of,
    time_trials,
    token_trials,
    tuning_trials,
)
from megatron_ladder.lab.study.material import Material, describe_machine, prepare_material
from megatron_ladder.lab.study.options import OWN_LINK, ReportOptions, Request
from megatron_ladder.lab.study.outcome import (
    read_course,
    remove_checkpoints,
    remove_unevaluated_end,
    result_of,
    write_result,
)
from megatron_ladder.lab.study.progress import GridProgress, Position
from megatron_ladder.lab.study.report import write_report
from megatron_ladder.lab.study.reproduction import compare_studies
from megatron_ladder.lab.study.scheduling import Job, Pool, noting_signals
from megatron_ladder.lab.study.timing import read_step_times, times_of_trials, timing_command
from megatron_ladder.lab.study.trial import Result, Trial, read_result
from megatron_ladder.lab.study.wirings import STANDARD
from megatron_ladder.train.lock import SaveLock

FREE_TO_CHANGE = ("machine", "command", "chosen", "step_times")
"""Fields of a study that no result follows from, or that follow from results."""
OUTPUT_NAME = "output.txt"
LAST_LINES = 12
"""Of a failed trial's output, that are shown."""
TIMING_ATTEMPTS = 3
"""At step times that the benchmark itself does not doubt."""


class Stopped(Exception):
    """A signal has asked for the end."""


def run_study(
    request: Request,
    argv: Sequence[str],
    start: "Callable[[Request, Material, Study, Sequence[int]], StudyRun] | None" = None,
    report: Callable[[Path, Path], Path | None] | None = None,
) -> None:
    """Does what is left of a study, and reports on it.

    Args:
        argv: as it was given, to be noted.
        start: what is done of it; the whole grid if not given.
        report: is told the study's folder and where to write, and returns what it has written; the grid's report if
            not given.

    Raises:
        UserError: the folder holds another study, or somebody else runs it.
        SystemExit: trials have failed; they were told.
    """
    options = request.options
    options.output_dir.mkdir(parents=True, exist_ok=True)
    with SaveLock(options.output_dir, flag="--output-dir"), noting_signals() as received:
        material = prepare_material(request)
        study = settle(options.output_dir, describe(request, material, argv))
        run = (start or StudyRun)(request, material, study, received)
        try:
            run.run()
        except Stopped:
            done, expected = len(run.progress.done), len(run.progress.expected)
            run.progress.say(
                f"stopped: {done} of about {expected} trials are done, and the others are saved as far as they are; "
                "the same command goes on from here"
            )
            return
        if any(result.trial.kind == "tokens" for result in run.results.values()):
            tell_report((report or write_report)(options.output_dir, options.report_dir or options.output_dir))
    if run.failures:
        print(f"error: {len(run.failures)} of the study could not be done:", file=sys.stderr)
        for failure in run.failures:
            print(f"error: {failure}", file=sys.stderr)
        print("error: the same command tries them again", file=sys.stderr, flush=True)
        sys.exit(ExitCode.INTERNAL)


def report_study(options: ReportOptions) -> None:
    """Writes the report of what is there."""
    study = read_study(options.output_dir)
    if study is None:
        raise UserError(f"--output-dir {options.output_dir}: holds no {STUDY_NAME}: give the folder of a study")
    output = options.report_dir or options.output_dir
    adaptation = write_adaptation(options.output_dir, output)
    if adaptation is None or study.wirings != (STANDARD,):
        tell_report(write_report(options.output_dir, output))
    tell_report(adaptation)
    if options.compare_with is not None:
        print(compare_studies(options.output_dir, options.compare_with), flush=True)


def tell_report(path: Path | None) -> None:
    """Where it is, if there is one."""
    if path is not None:
        print(f"report: {path}", flush=True)


def describe(request: Request, material: Material, argv: Sequence[str]) -> Study:
    """The study that was asked for, before anything of it is done."""
    options = request.options
    first = Trial("tokens", options.wirings[0], options.sizes[0], 0, options.learning_rates[0], options.iterations)
    return Study(
        wirings=options.wirings,
        timed_wirings=timed_wirings(options),
        sizes={size: _sizes_of(size) for size in options.sizes},
        seeds=options.seeds,
        tuning_seed=options.tuning_seed,
        learning_rates=options.learning_rates,
        iterations=options.iterations,
        tuning_iterations=options.tuning_iterations,
        tokens_per_step=resolve_trial(request, material.flags, first, []).tokens_per_step,
        seq_length=options.seq_length,
        link=options.link,
        training_flags=common_flags(request),
        data=material.words,
        machine=describe_machine(),
        command=("python", "tools/study.py", *argv),
        schedule={"warm_up": options.warm_up_share, "last": options.last_rate_share},
    )


def _sizes_of(size: str) -> Mapping[str, int]:
    shape = find_size(size)
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {name: getattr(shape, name) for name in names}


def settle(folder: Path, asked: Study) -> Study:
    """The study of the folder, which is the one that was asked for; written if there is none.

    Raises:
        UserError: it is another one; a line for each difference.
    """
    found = read_study(folder)
    if found is None:
        write_study(folder, asked)
        return asked
    differences = [
        f"{folder / STUDY_NAME}: {field.name.replace('_', ' ')}: was {_plain(getattr(found, field.name))}, now asked "
        f"for {_plain(getattr(asked, field.name))}: give another --output-dir, or the same settings"
        for field in fields(Study)
        if field.name not in FREE_TO_CHANGE and _plain(getattr(found, field.name)) != _plain(getattr(asked, field.name))
    ]
    if differences:
        raise UserError(*differences)
    return found


def _plain(value: object) -> str:
    return json.dumps(value)


def write_study(folder: Path, study: Study) -> None:
    """Replaces the description, whole."""
    write_whole(folder / STUDY_NAME, (json.dumps(study.to_dict(), indent=1) + "\n").encode())


class StudyRun:
    """One start of a study.

    Attributes:
        failures: a line for each thing that could not be done.
        results: trials that are done, by their names.
    """

    def __init__(self, request: Request, material: Material, study: Study, received: Sequence[int]) -> None:
        self.request = request
        self.options = request.options
        self.material = material
        self.study = study
        self.failures: list[str] = []
        self.results: dict[str, Result] = {}
        self.progress = GridProgress(self._cost, self._position)
        self._pool = Pool(self.options.jobs, received)
        self._received = received
        self._resolved: dict[tuple[str, str], RunConfig] = {}
        self._further: list[Trial] = []
        parallel = read_training_flags(request.training_flags, []).parallel
        self._processes = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        self._tensor_parallel = parallel.tensor_model_parallel_size

    def run(self) -> None:
        """All that is left, in order.

        Raises:
            Stopped: a signal has come.
        """
        self._update(self.study)
        self._tune(tuning_trials(self.study))
        if self.failures:
            # Chosen now, some wirings would have been tried at fewer rates than others.
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
        """Keeps what has been found out."""
        if study is not self.study:
            write_study(self.options.output_dir, study)
        self.study = study
        self.progress.expected = [*expected_trials(study), *self._further]

    def _tune(self, trials: Sequence[Trial]) -> None:
        """Trains those that choose learning rates, and further ones where the best one is at the edge."""
        self._train(trials)
        while not self.failures and (further := further_trials(self.study, self._losses())):
            self._further += further
            self.progress.expected = [*self.progress.expected, *further]
            self._train(further)

    def _losses(self) -> dict[Trial, float]:
        return {result.trial: result.final_loss for result in self.results.values()}

    def _choose(self) -> None:
        study, losses = self.study, self._losses()
        # What was chosen stays: trials were trained with it.
        before = study.chosen
        chosen = {**choose_learning_rates(study, losses), **before}
        self._update(replace(study, chosen=chosen))
        keys = [key_of(size, wiring) for size in study.sizes for wiring in study.wirings]
        lacking = [key for key in keys if key not in chosen]
        self.failures += [f"{key}: no learning rate could be chosen: not trained further" for key in lacking]
        if len(study.learning_rates) > 1:
            told = ", ".join(f"{key} {rate:g}" for key, rate in chosen.items())
            self.progress.say(f"learning rates: {told}")
            for key in set(at_the_edge(self.study, losses)) - set(before):
                self.progress.say(f"*** {key}: {chosen[key]:g} is at the edge of the rates tried ***")

    def _train(self, trials: Sequence[Trial]) -> None:
        by_name = {trial.name: trial for trial in trials}
        left = [trial for trial in trials if not self._collect(trial)]
        jobs = (self._job(trial) for trial in left)

        def ended(job: Job, code: int) -> None:
            self._judge(by_name[job.name], job, code)

        if not self._pool.run(jobs, ended, lambda running: self.progress.tick([by_name[job.name] for job in running])):
            raise Stopped

    def _job(self, trial: Trial) -> Job:
        folder = folder_of(self.options, trial)
        for name in remove_unevaluated_end(folder, trial.iterations):
            self.progress.say(f"{trial.name}: removed {name}: its run was cut off before its last evaluation")
        self.progress.starts(trial)
        return Job(
            trial.name, self._command(trial), environment_of(self.options), folder / OUTPUT_NAME, self._slots(trial)
        )

    def _command(self, trial: Trial) -> tuple[str, ...]:
        return training_command(self.request, self.material.flags, trial, self._ranks(trial))

    def _ranks(self, trial: Trial) -> int:
        run = self._run_of(trial)
        return run.parallel.tensor_model_parallel_size * run.parallel.pipeline_model_parallel_size

    def _slots(self, trial: Trial) -> int:
        return 1 if self.options.launcher is not None else self._ranks(trial)

    def _run_of(self, trial: Trial) -> RunConfig:
        """Its configuration but for seed, learning rate and length."""
        key = (trial.size, trial.wiring)
        if key not in self._resolved:
            self._resolved[key] = resolve_trial(self.request, self.material.flags, trial, [])
        return self._resolved[key]

    def _collect(self, trial: Trial) -> bool:
        """Whether a trial is done; its result is then known, and what it needs no more is removed."""
        folder = folder_of(self.options, trial)
        result = read_result(folder)
        if result is None:
            run = self._run_of(trial)
            parameters = parameter_count(run.model).total
            course = read_course(folder)
            result = result_of(trial, course, parameters, run.tokens_per_step, self._command(trial))
            if result is None:
                return False
            # First, and only now: a later start may have another --keep-checkpoints.
            if trial.kind == "tuning" or not self.options.keep_checkpoints:
                remove_checkpoints(folder)
            write_result(folder, result)
        self.results[trial.name] = result
        self.progress.done.add(trial.name)
        return True

    def _judge(self, trial: Trial, job: Job, code: int) -> None:
        """What a job that has ended has come to."""
        if self._collect(trial):
            result = self.results[trial.name]
            told = f"validation loss {result.final_loss:.4f}, {result.tokens_per_second:,.0f} tokens/s"
            self.progress.ends(trial, f"{told}, {result.seconds:,.0f} s")
            return
        if self._received:
            self.progress.ends(trial, "stopped", is_done=False)
            return
        reason = f"exit code {code}" if code else "it has no validation loss of its last step: it needs validation data"
        self.progress.ends(trial, f"failed: {reason}; the end of {job.output}:\n{_last_lines(job.output)}", False)
        self.failures.append(f"{trial.name}: {reason}: see {job.output}")

    def _time_steps(self, size: str) -> None:
        """Measures, alone on this machine, unless it is done or not needed."""
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
            self.progress.say(f"{job.name}: measured with {self.options.link}")
            if not self._pool.run([job], lambda _, code: codes.append(code)):
                raise Stopped
            if not rows.is_file():
                self.failures.append(f"{job.name}: exit code {codes[-1]}: see {output}; no trials at equal time")
                self.progress.say(f"{job.name}: failed:\n{_last_lines(output)}")
                return
            times, doubts = read_step_times(rows, self.study, size, command)
            if not doubts:
                break
        for doubt in doubts:
            self.progress.say(f"*** step times: {doubt}, in {TIMING_ATTEMPTS} attempts ***")
        told = ", ".join(f"{wiring} {ratio:.3f}" for wiring, ratio in times.speedup.items())
        self.progress.say(f"{job.name}: {times.interconnect}: standard over it: {told}")
        self._update(replace(self.study, step_times={**self.study.step_times, size: times}))

    def _take_own_times(self, size: str) -> None:
        """From the trials at equal tokens, once all of them are there: what is trained by it must not change."""
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

    def _cost(self, trial: Trial) -> float:
        run = self._run_of(trial)
        return float(trial.iterations * run.tokens_per_step * parameter_count(run.model).total * self._slots(trial))

    def _position(self, trial: Trial) -> Position:
        if trial.name in self.results:
            return Position(trial.iterations, None, None)
        course = read_course(folder_of(self.options, trial))
        if not course.progress:
            return Position(0, None, None)
        last = course.progress[-1]
        return Position(course.iteration, float(last["loss"]), float(last["tokens_per_second"]))


def _last_lines(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(f"    {line}" for line in lines)
