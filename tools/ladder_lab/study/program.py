"""Runs studies, from their command line to their report, and resumes them.

1. step times, on a machine that does nothing else yet.
2. tuning: every learning rate for every wiring, with a separate seed; the lowest validation loss wins. If the best rate
   is at the edge of the tried ones, rates beyond it are tried.
3. tokens: every wiring with every seed, for the same number of steps.
4. time: some wirings again, for as many steps as they can do in the time of standard.
"""

import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladder_lab.bench.paired import RatioVerdict
from ladder_lab.bench.sizes import find_size
from ladder_lab.study.options import OWN_LINK, Parsed
from ladder_lab.study.report import STUDY_NAME, read_study, write_report
from ladder_lab.study.trials import (
    ROOT,
    STANDARD,
    TUNING_SEED,
    Request,
    StudyStopped,
    Trial,
    TrialRunner,
    common_flags,
    last_lines,
    read_training_flags,
    resolve_size,
    transferred_rate,
)
from megatron_ladder.blueprint.tensors import active_parameters
from megatron_ladder.command_line import flag_words
from megatron_ladder.data.indexed import read_sidecar
from megatron_ladder.errors import ExitCode, UserError, raise_user_errors
from megatron_ladder.files import write_atomically
from megatron_ladder.processes import received_signals
from megatron_ladder.train.record import save_lock

MOST_FURTHER = 3
"""Most learning rates that are tried beyond the grid."""
TIMING_ROUNDS = 15
"""Rounds of a measurement of step times."""
TIMING_ATTEMPTS = 3
"""Most measurements until the benchmark finds one sound."""
_EXTENSIBLE = ("sizes", "wirings", "timed_wirings", "seeds")
"""Settings to which a later start can add values, because a trial depends on none but its own."""


def run_study(parsed: Parsed) -> None:
    """Run the missing trials of a study and write its report. Raises UserError, and SystemExit if trials fail."""
    folder = parsed.request.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    with save_lock(folder, field_name="output_dir"), received_signals() as received:
        parsed = replace(parsed, request=_prepare_data(parsed))
        runner = TrialRunner(parsed.request, parsed.training.jobs, received)
        study = _Study(parsed, runner)
        study.load()
        try:
            _compare(study)
        except StudyStopped:
            print("stopped: the running trials were saved; the same command resumes the study", flush=True)
            return
        if report := write_report(folder):
            print(f"report: {report}", flush=True)
    if runner.failures:
        lines = [f"{len(runner.failures)} parts of the study failed:", *runner.failures]
        print(*(f"error: {line}" for line in [*lines, "the same command runs them again"]), sep="\n", file=sys.stderr)
        sys.exit(ExitCode.INTERNAL)


@dataclass
class _Study:
    """The state of a study, of which `study.json` has the settings, the chosen rates and the step times."""

    parsed: Parsed
    runner: TrialRunner
    chosen: dict[str, float] = field(default_factory=dict)
    """`size/wiring` -> learning rate."""
    step_times: dict[str, Any] = field(default_factory=dict)
    """Size -> {wiring -> the row of the benchmark}."""

    @property
    def models(self) -> list[tuple[str, str]]:
        """Size and wiring of every model that is trained from scratch."""
        return [(size, wiring) for size in self.parsed.grid.sizes for wiring in self.parsed.grid.wirings]

    def trial(self, kind: Any, size: str, wiring: str, seed: int, **changes: Any) -> Trial:
        """Return a trial at the chosen rate and the number of steps at equal tokens, unless `changes` has others."""
        rate = self.chosen.get(f"{size}/{wiring}", 0.0)
        return replace(Trial(kind, size, wiring, seed, rate, self.parsed.iterations(size)), **changes)

    def settings(self) -> dict[str, Any]:
        """Return everything on which results depend."""
        grid = self.parsed.grid
        training = self.parsed.training
        request = self.parsed.request
        settings: dict[str, Any] = {name: getattr(grid, name) for name in ("sizes", "wirings", "link")}
        names = ("seeds", "iterations", "tokens_per_parameter", "learning_rates", "transfer_rates", "evaluations")
        settings |= {name: getattr(training, name) for name in names}
        settings |= {"timed_wirings": self.parsed.timed_wirings, "training_flags": common_flags(request)}
        return json.loads(json.dumps({**settings, "data": request.data_flags or "given"}))

    def load(self) -> None:
        """Read the study of the folder, or write this one.

        Raises UserError if it is damaged, or if other settings differ.
        """
        path = self.parsed.request.output_dir / STUDY_NAME
        now: dict[str, Any] = self.settings()
        before = read_study(path.parent)
        if before is not None:
            problems = []
            for name, old in before["settings"].items():
                new = now.get(name)
                is_extended = name in _EXTENSIBLE and set(old) <= set(now[name])
                if new != old and not is_extended:
                    further = " and further ones" if name in _EXTENSIBLE else ""
                    text = f"{path}: {name.replace('_', ' ')}: was {json.dumps(old)}, now {json.dumps(new)}"
                    problems.append(f"{text}: give another --output-dir, or the same settings{further}")
            raise_user_errors(problems)
            # Trials were trained with the rates and for the lengths that were found before.
            self.chosen |= before["chosen"]
            self.step_times = before["step_times"]
        self.save()

    def save(self) -> None:
        """Write the state atomically."""
        request = self.parsed.request
        data = read_training_flags((*request.data_flags, *request.training_flags))
        prefixes = [Path(word) for word in map(str, (*data["data_path"], *data["train_data_path"]))]
        sidecars = {prefix: read_sidecar(prefix) for prefix in prefixes}
        state = {
            "data": [f"{known.tokens:,} tokens in {prefix}" for prefix, known in sidecars.items() if known is not None],
            "settings": self.settings(),
            "sizes": {size: self._facts(size) for size in self.parsed.grid.sizes},
            "chosen": self.chosen,
            "step_times": self.step_times,
            "tokens_per_step": self.parsed.training.global_batch_size * self.parsed.training.seq_length,
            "machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}",
            "commands": [shlex.join(["python", "tools/study.py", *sys.argv[1:]])],
        }
        write_atomically(request.output_dir / STUDY_NAME, json.dumps(state, indent=1) + "\n")

    def _facts(self, size: str) -> dict[str, int]:
        iterations = self.parsed.iterations(size)
        model = resolve_size(self.parsed.request, size)
        return {"parameters": active_parameters(model), "width": model.hidden_size, "iterations": iterations}

    def tune(self) -> None:
        """Choose the learning rates of the models that have none."""
        rates = self.parsed.training.learning_rates
        sizes = sorted(self.parsed.grid.sizes, key=lambda size: find_size(size).hidden_size)
        tuned = sizes[:2] if self.parsed.training.transfer_rates else sizes
        open_models = [model for model in self.models if model[0] in tuned and "/".join(model) not in self.chosen]
        if len(rates) == 1:
            self.chosen |= {"/".join(model): rates[0] for model in open_models}
        else:
            tried = {model: sorted(rates) for model in open_models}
            while not self.runner.failures:
                self.runner.run(self._tuning(model, rate) for model, values in tried.items() for rate in values)
                losses = {model: self._losses(model, values) for model, values in tried.items()}
                extended = False
                for model, rate_losses in losses.items():
                    value = value_beyond(rate_losses)
                    if value is not None and len(rate_losses) < len(rates) + MOST_FURTHER:
                        tried[model] = sorted([*tried[model], value])
                        extended = True
                if not extended or self.runner.failures:
                    break
            if self.runner.failures:
                # Otherwise some wirings would have tried fewer rates than others.
                return
            for model, rate_losses in losses.items() if open_models else ():
                if math.isfinite(min(rate_losses.values())):
                    self.chosen["/".join(model)] = min(rate_losses, key=lambda rate: rate_losses[rate])
                else:
                    self.runner.failures.append(f"{'/'.join(model)}: every learning rate diverged: not trained further")
        for size, wiring in self.models:
            source = self.chosen.get(f"{tuned[-1]}/{wiring}")
            if size not in tuned and source is not None:
                self.chosen.setdefault(f"{size}/{wiring}", transferred_rate(source, tuned[-1], size))
        self.save()

    def _tuning(self, model: tuple[str, str], rate: float) -> Trial:
        return self.trial("tuning", *model, TUNING_SEED, learning_rate=rate)

    def _losses(self, model: tuple[str, str], rates: Sequence[float]) -> dict[float, float]:
        results = {rate: self.runner.results.get(self._tuning(model, rate)) for rate in rates}
        return {rate: result["validation"][-1][1] for rate, result in results.items() if result is not None}


def value_beyond(losses: Mapping[float, float]) -> float | None:
    """Return the next value of the geometric series beyond the best value; None if the best is between two others.

    Args:
        losses: the loss of each value that was tried.
    """
    values = sorted(losses)
    best = min(values, key=lambda value: losses[value], default=math.inf)
    if len(values) < 2 or best not in (values[0], values[-1]) or not math.isfinite(losses[best]):
        return None
    neighbour = values[1] if best == values[0] else values[-2]
    # Names and command lines of trials contain it.
    return float(f"{best * best / neighbour:.3g}")


def _prepare_data(parsed: Parsed) -> Request:
    """Return the request with the flags of the data; builds the default corpus if no data are given."""
    request = parsed.request
    given = read_training_flags(request.training_flags)
    if given["data_path"] or given["train_data_path"] or given["streaming"]:
        return request
    folder = request.output_dir / "data"
    vocabularies = {find_size(size).vocab_size for size in parsed.grid.sizes}
    if len(vocabularies) > 1:
        vocabulary_sizes = ", ".join(map(str, sorted(vocabularies)))
        fix = "give sizes with the same vocabulary, or other data after --"
        raise UserError(f"--sizes have vocabularies of {vocabulary_sizes}, but the default corpus has one: {fix}")
    if not (folder / "valid_text_document.json").is_file():
        script = ROOT / "examples" / "prepare_corpus.py"
        words = ["--output-dir", str(folder), "--vocab-size", str(vocabularies.pop())]
        if subprocess.run([sys.executable, str(script), *words]).returncode:
            raise UserError(f"{script} failed: give other data after --")
    # Validation text of the same kind, because wirings are compared by how well they learn it.
    data = ("--data-path", str(folder / "train_text_document"), "--split", "96,4,0")
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "tokenizer.model"))
    return replace(request, data_flags=(*data, *tokenizer))


def _compare(study: _Study) -> None:
    """Run the grid: step times, learning rates, equal tokens, equal time."""
    is_emulated = study.parsed.grid.link != OWN_LINK
    # A measurement wants a quiet machine, which its user had when starting the study.
    if is_emulated:
        _time_steps(study)
    study.tune()
    if not study.chosen:
        return
    seeds = study.parsed.training.seeds
    trained = [model for model in study.models if "/".join(model) in study.chosen]
    # Seeds are the outermost loop, so that an interrupted study has whole pairs.
    study.runner.run(study.trial("tokens", *model, seed) for seed in seeds for model in trained)
    if not is_emulated:
        _time_steps(study)
    steps: dict[tuple[str, str], int] = {}
    for size, times in study.step_times.items():
        for wiring, row in times.items():
            steps[size, wiring] = max(1, round(study.parsed.iterations(size) * row["speedup"]))
    longer = [(size, wiring) for (size, wiring), count in steps.items() if count != study.parsed.iterations(size)]
    longer = [model for model in longer if model in trained]
    study.runner.run(study.trial("time", *model, seed, iterations=steps[model]) for seed in seeds for model in longer)


def _time_steps(study: _Study) -> None:
    """Add the step times of wirings that have none; a trial keeps the length that earlier times gave it."""
    measure = _own_times if study.parsed.grid.link == OWN_LINK else _measured_times
    for size in study.parsed.grid.sizes:
        known = study.step_times.get(size, {})
        if wirings := [wiring for wiring in study.parsed.timed_wirings if wiring not in known]:
            study.step_times[size] = {**measure(study, size, list(dict.fromkeys((STANDARD, *wirings)))), **known}
            study.save()


def _own_times(study: _Study, size: str, wirings: Sequence[str]) -> dict[str, Any]:
    """Take the speed-ups from the trials at equal tokens, paired by seed."""
    tokens = study.parsed.training.global_batch_size * study.parsed.training.seq_length

    def speeds(wiring: str) -> dict[int, float]:
        trials = {seed: study.trial("tokens", size, wiring, seed) for seed in study.parsed.training.seeds}
        results = {seed: study.runner.results.get(trial) for seed, trial in trials.items()}
        return {seed: result["tokens_per_second"] for seed, result in results.items() if result is not None}

    standard = speeds(STANDARD)
    times = {}
    for wiring in wirings:
        speed_of_seed = speeds(wiring)
        if ratios := [speed_of_seed[seed] / standard[seed] for seed in speed_of_seed if standard.get(seed)]:
            times[wiring] = {
                "speedup": statistics.median(ratios),
                "spread": max(ratios) - min(ratios),
                "seconds": tokens / statistics.median(speed_of_seed.values()),
                "link": "that of the trials, from their tokens per second",
            }
    return times


def _measured_times(study: _Study, size: str, wirings: Sequence[str]) -> dict[str, Any]:
    """Measure step times with the benchmark; nothing after a failure."""
    folder = study.parsed.request.output_dir / "timing" / size
    rows = folder / "rows.json"
    output = folder / "output.txt"
    grid = study.parsed.grid
    training = study.parsed.training
    values = {
        "tp": grid.timing_ranks,
        "sizes": size,
        "batch": training.micro_batch_size,
        "sequence": training.seq_length,
        "alpha": grid.link,
        "rounds": TIMING_ROUNDS,
        "json": rows,
        "wirings": wirings,
    }
    command = [sys.executable, str(ROOT / "tools" / "benchmark.py"), "train", *flag_words(values)]
    times: dict[str, Any] = {}
    for _ in range(TIMING_ATTEMPTS):
        # Run the benchmark.
        rows.unlink(missing_ok=True)
        print(f"step times of {size}: measuring with {grid.link}", flush=True)
        code = study.runner.execute(command, output)
        if study.runner.received:
            raise StudyStopped
        if not rows.is_file():
            study.runner.failures.append(f"step times of {size}: exit code {code}: see {output}")
            print(last_lines(output), flush=True)
            return {}
        # Read its rows.
        table = json.loads(rows.read_text(encoding="utf-8"))
        times = {}
        for row in table:
            if row["wiring"] not in wirings:
                continue
            link = f"{row['interconnect']}, an all-reduce takes {1e3 * row['alpha_seconds']:.3f} ms ({row['alpha']})"
            if row["verdict"] != RatioVerdict.SOUND.value:
                link += f"; {row['verdict']}"
            times[row["wiring"]] = {
                "speedup": row["ratio_to_standard"],
                "spread": row["spread"],
                "seconds": row["median_seconds"],
                "link": link,
            }
        times[STANDARD] |= {"speedup": 1.0, "spread": 0.0}
        if all(row["verdict"] == RatioVerdict.SOUND.value for row in table):
            break
    return times
