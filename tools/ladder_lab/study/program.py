"""Runs a study, from its command line to its report, and resumes it."""

import functools
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladder_lab.bench.sizes import find_size
from ladder_lab.study import commands, grid, outcome, schema
from ladder_lab.study.command_line import timed_wirings
from ladder_lab.study.commands import environment_of, folder_of
from ladder_lab.study.options import OWN_LINK, Request, RunOptions
from ladder_lab.study.report import write_report
from ladder_lab.study.results import read_results
from ladder_lab.study.scheduling import GridProgress, Job, run_jobs
from ladder_lab.study.schema import Result, StepTimes, Study, Trial, rate_key, read_result, write_json
from ladder_lab.study.wirings import STANDARD
from megatron_ladder.blueprint.tensors import parameter_count
from megatron_ladder.config.run import RunConfig
from megatron_ladder.data.sidecar import read_sidecar
from megatron_ladder.errors import ExitCode, UserError
from megatron_ladder.processes import received_signals
from megatron_ladder.train.lock import SaveLock

OUTPUT_NAME = "output.txt"
LAST_LINES = 12
_SPLIT = "96,4,0"
_DATA_FIELDS = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "streaming")
TIMING_ATTEMPTS = 3
"""Most measurements of step times until the benchmark finds them sound."""


class _StudyStopped(Exception):
    """A signal requested the end."""


def run_study(request: Request, kind: "type[StudyRun] | None" = None) -> None:
    """Run the missing trials of a study and write its report. Raises UserError, and SystemExit if trials fail."""
    options = request.options
    chosen = _transferred_rates(options)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    with SaveLock(options.output_dir, flag="--output-dir"), received_signals() as received:
        request, data = _prepare_data(request)
        check = functools.partial(_reject_other_ranks, options)
        study = schema.load_or_create_study(options.output_dir, _describe(request, data, chosen), check)
        run = (kind or StudyRun)(request, study, received)
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
            print(f"report: {run.report(options.report_dir or options.output_dir)}", flush=True)
    if run.failures:
        lines = [f"{len(run.failures)} parts of the study failed:", *run.failures, "the same command runs them again"]
        print(*(f"error: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
        sys.exit(ExitCode.INTERNAL)


def _prepare_data(request: Request) -> tuple[Request, str]:
    """Return the request with the flags of the data, and its description; builds the default corpus if needed."""
    data = commands.read_training_flags(request.training_flags, []).data
    given = [value for value in (getattr(data, name) for name in _DATA_FIELDS) if value]
    if given:
        words = [str(word) for value in given for word in (value if isinstance(value, tuple) else [value])]
        return request, " ".join(words) + _describe_tokens([*data.data_path, *data.train_data_path])
    folder = request.options.output_dir / "data"
    vocabularies = {find_size(size).vocab_size for size in request.options.sizes}
    if len(vocabularies) > 1:
        found = ", ".join(map(str, sorted(vocabularies)))
        fix = "give sizes with the same vocabulary, or other data after --"
        raise UserError(f"--sizes have vocabularies of {found}, but the default corpus has one: {fix}")
    if not (folder / "valid_text_document.json").is_file():
        script = Path(__file__).resolve().parents[3] / "examples" / "prepare_corpus.py"
        words = ["--output-dir", str(folder), "--vocab-size", str(vocabularies.pop())]
        if subprocess.run([sys.executable, str(script), *words]).returncode:
            raise UserError(f"{script} failed: give other data after --")
    sources = folder / "train_text_document"
    # Validation text of the same kind, because wirings are compared by how well they learn it.
    flags = ("--data-path", str(sources), "--split", _SPLIT)
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "tokenizer.model"))
    about = f"the sources of Python {platform.python_version()}'s standard library, the last of them held out"
    return replace(request, data_flags=(*flags, *tokenizer)), f"{about} (--split {_SPLIT}){_describe_tokens([sources])}"


def _describe_tokens(prefixes: Sequence[Path]) -> str:
    found = [(prefix, read_sidecar(prefix)) for prefix in prefixes]
    return "".join(f", {one.tokens:,} tokens in {prefix.name}" for prefix, one in found if one is not None)


def _describe(request: Request, data: str, chosen: dict[str, float]) -> Study:
    options = request.options
    shapes = {size: find_size(size) for size in options.sizes}
    first = Trial("tokens", options.wirings[0], options.sizes[0], 0, options.learning_rates[0], options.iterations)
    same = "wirings seeds tuning_seed iterations seq_length link".split()
    return Study(
        **{name: getattr(options, name) for name in same},
        learning_rates=options.learning_rates if options.learning_rates_from is None else (),
        chosen=chosen,
        tuning_iterations=options.tuning_iterations or options.iterations,
        timed_wirings=timed_wirings(options),
        sizes={size: {name: getattr(shapes[size], name) for name in commands.SHAPE_FIELDS} for size in shapes},
        tokens_per_step=commands.resolve_trial(request, first, []).tokens_per_step,
        training_flags=commands.common_flags(request),
        data=data,
        machine=commands.describe_machine(),
        command=request.command,
        schedule={"warm_up": options.warm_up_share, "last": options.last_rate_share},
    )


def _transferred_rates(options: RunOptions) -> dict[str, float]:
    """Return the rates of the first size of `--learning-rates-from`, times the ratio of the hidden sizes, if given."""
    source = options.learning_rates_from
    if source is None:
        return {}
    other = schema.read_study(source)
    if other is None:
        raise UserError(f"--learning-rates-from {source}: not a study: expected the --output-dir of one")
    size, shape = next(iter(other.sizes.items()))
    rates = {wiring: other.rate(size, wiring) for wiring in options.wirings}
    if missing := [wiring for wiring, rate in rates.items() if rate is None]:
        raise UserError(
            f"--learning-rates-from {source}: has chosen no rate for {', '.join(missing)}: add these --wirings to that "
            "study, or leave them out"
        )
    ratios = {new: shape["hidden_size"] / find_size(new).hidden_size for new in options.sizes}
    return {
        rate_key(new, wiring): float(f"{rate * ratio:.4g}")
        for new, ratio in ratios.items()
        for wiring, rate in rates.items()
        if rate is not None
    }


def _reject_other_ranks(options: RunOptions, study: Study) -> None:
    """Raise a UserError if further step times would be measured with another number of ranks than the first ones."""
    others = {times.ranks for times in study.step_times.values()} - {options.timing_ranks}
    if options.link != OWN_LINK and others and any(grid.untimed_wirings(study, size) for size in study.sizes):
        raise UserError(
            f"--timing-ranks {options.timing_ranks}: the step times of this study were measured with {others.pop()}; "
            "use that number, or another --output-dir"
        )


class StudyRun:
    """One start of a study, with a message for each failed part and the results of finished trials by name."""

    def __init__(self, request: Request, study: Study, received: Sequence[int]) -> None:
        self.request = request
        self.options = request.options
        self.study = study
        self.failures: list[str] = []
        self.results: dict[str, Result] = {}
        self.progress = GridProgress(self._position)
        self._received = received
        self._resolved: dict[tuple[str, str], RunConfig] = {}
        self._further: list[Trial] = []
        self._diverged: set[str] = set()

    def run(self) -> None:
        """Run all missing trials, in order. Raises `_StudyStopped` when a signal arrives."""
        self._expect()
        self._tune(grid.tuning_trials(self.study))
        if self.failures:
            # Otherwise some wirings would have tried fewer rates than others.
            return
        self._choose()
        if self.options.link != OWN_LINK:
            self._time_steps()
        self._train(grid.token_trials(self.study))
        if self.options.link == OWN_LINK:
            self._time_steps()
        self._train(grid.time_trials(self.study))

    def report(self, output: Path) -> Path | None:
        """Write the report into a folder."""
        return write_report(read_results(self.options.output_dir), output)

    def _update(self, **changes: Any) -> None:
        self.study = replace(self.study, **changes)
        schema.write_study(self.options.output_dir, self.study)
        self._expect()

    def _expect(self) -> None:
        self.progress.expected = [*grid.expected_trials(self.study, self._diverged), *self._further]

    def _tune(self, trials: Sequence[Trial]) -> None:
        """Run the tuning trials, and further ones while a best learning rate is at the edge."""
        self._train(trials)
        while not self.failures and (further := grid.further_trials(self.study, self._losses())):
            self._further += further
            self.progress.expected = [*self.progress.expected, *further]
            self._train(further)

    def _losses(self) -> dict[Trial, float]:
        return {result.trial: result.final_loss for result in self.results.values()}

    def _choose(self) -> None:
        study, losses = self.study, self._losses()
        # Earlier choices stay, because trials were trained with them.
        chosen = {**grid.choose_learning_rates(study, losses), **study.chosen}
        self._diverged = {rate_key(*model) for model in study.models} - chosen.keys()
        self._update(chosen=chosen)
        if len(study.learning_rates) > 1:
            self.progress.say(f"learning rates: {', '.join(f'{key} {rate:g}' for key, rate in chosen.items())}")
        for model in study.models:
            key = rate_key(*model)
            if key not in chosen:
                self.failures.append(f"{key}: every learning rate diverged: not trained further")
            elif key not in study.chosen and grid.is_at_the_edge(chosen[key], grid.tried_rates(study, losses, *model)):
                self.progress.say(f"*** {key}: {chosen[key]:g} is at the edge of the rates tried ***")

    def _train(self, trials: Sequence[Trial]) -> None:
        left = {trial.name: trial for trial in trials if not self._collect(trial)}

        def on_end(job: Job, code: int) -> None:
            self._finish(left[job.name], job, code)

        def on_poll(running: Sequence[Job]) -> None:
            self.progress.update([left[job.name] for job in running])

        if not run_jobs(map(self._job, left.values()), self.options.jobs, self._received, on_end, on_poll):
            raise _StudyStopped

    def _job(self, trial: Trial) -> Job:
        folder = folder_of(self.options, trial)
        for name in outcome.remove_unevaluated_end(folder, trial.iterations):
            self.progress.say(f"{trial.name}: removed {name}: interrupted before the last evaluation")
        self.progress.start(trial)
        slots = self._configuration(trial).world_size if self.options.launcher is None else 1
        return Job(trial.name, self._command(trial), environment_of(self.options), folder / OUTPUT_NAME, slots)

    def _command(self, trial: Trial) -> tuple[str, ...]:
        return commands.training_command(self.request, trial, self._configuration(trial).world_size)

    def _configuration(self, trial: Trial) -> RunConfig:
        # Except for seed, learning rate and length.
        key = (trial.size, trial.wiring)
        if key not in self._resolved:
            self._resolved[key] = commands.resolve_trial(self.request, trial, [])
        return self._resolved[key]

    def _collect(self, trial: Trial) -> bool:
        """Return whether a trial is done. If so, store its result and remove its checkpoints."""
        folder = folder_of(self.options, trial)
        result = read_result(folder)
        if result is None:
            run, history = self._configuration(trial), outcome.read_history(folder)
            parameters = parameter_count(run.model).total
            result = outcome.result_of(trial, history, parameters, run.tokens_per_step, self._command(trial))
            if result is None:
                return False
            # Only here, because a later start can have another --keep-checkpoints.
            if trial.kind == "tuning" or not self.options.keep_checkpoints:
                outcome.remove_checkpoints(folder)
            write_json(folder / schema.RESULT_NAME, result)
        self.results[trial.name] = result
        self.progress.done.add(trial.name)
        return True

    def _finish(self, trial: Trial, job: Job, code: int) -> None:
        if self._collect(trial):
            result = self.results[trial.name]
            text = f"validation loss {result.final_loss:.4f}, {result.tokens_per_second:,.0f} tokens/s"
            self.progress.end(trial, f"{text}, {result.seconds:,.0f} s")
        elif self._received:
            self.progress.end(trial, "stopped", is_done=False)
        else:
            reason = f"exit code {code}" if code else "no validation loss of the last step: add validation data"
            self.progress.end(trial, f"failed: {reason}; the end of {job.output}:\n{_last_lines(job.output)}", False)
            self.failures.append(f"{trial.name}: {reason}: see {job.output}")

    def _time_steps(self) -> None:
        for size in self.study.sizes:
            if not (untimed := grid.untimed_wirings(self.study, size)):
                continue
            times = self._own_times(size) if self.options.link == OWN_LINK else self._measured_times(size, untimed)
            if times is not None and not times.speedup.keys().isdisjoint(untimed):
                # Trials have the lengths that earlier times gave them.
                before = self.study.step_times.get(size)
                times = times if before is None else before.extended_by(times)
                self._update(step_times={**self.study.step_times, size: times})

    def _measured_times(self, size: str, wirings: Sequence[str]) -> StepTimes | None:
        """Measure the step times of wirings and of standard, with no other job; None after a failure."""
        folder = self.options.output_dir / "timing" / size
        rows, output = folder / "rows.json", folder / OUTPUT_NAME
        wirings = (STANDARD, *(name for name in wirings if name != STANDARD))
        command = commands.timing_command(self.options, wirings, size, rows)
        job = Job(f"step times of {size}", command, environment_of(self.options), output, self.options.jobs)
        codes: list[int] = []
        for _ in range(TIMING_ATTEMPTS):
            rows.unlink(missing_ok=True)
            self.progress.say(f"{job.name}: measuring with {self.options.link}")
            if not run_jobs([job], job.slots, self._received, lambda _, code: codes.append(code)):
                raise _StudyStopped
            if not rows.is_file():
                self.failures.append(f"{job.name}: exit code {codes[-1]}: see {output}; no trials at equal time")
                self.progress.say(f"{job.name}: failed:\n{_last_lines(output)}")
                return None
            times, doubts = outcome.read_step_times(rows, wirings, size, command)
            if not doubts:
                break
        for doubt in doubts:
            self.progress.say(f"*** step times: {doubt}, in {TIMING_ATTEMPTS} attempts ***")
        ratios = ", ".join(f"{wiring} {ratio:.3f}" for wiring, ratio in times.speedup.items())
        self.progress.say(f"{job.name}: {times.interconnect}: standard over wiring: {ratios}")
        return times

    def _own_times(self, size: str) -> StepTimes | None:
        """Take step times from the trials at equal tokens; None until all have finished, so that they never change."""
        timed = [trial for trial in grid.token_trials(self.study) if trial.wiring in self.study.timed_wirings]
        if any(trial.size == size and trial.name not in self.results for trial in timed):
            return None
        ranks = commands.read_training_flags(self.request.training_flags, []).parallel.tensor_model_parallel_size
        return outcome.times_of_trials([*self.results.values()], self.study, size, ranks)

    def _position(self, trial: Trial) -> tuple[int, float | None]:
        """Return the last iteration of a trial, and its loss if it is running."""
        if trial.name in self.results:
            return trial.iterations, None
        history = outcome.read_history(folder_of(self.options, trial))
        return history.iteration, float(history.progress[-1]["loss"]) if history.progress else None


def _last_lines(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(f"    {line}" for line in lines)
