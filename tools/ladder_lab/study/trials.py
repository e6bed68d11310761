"""Trials: training runs of a study, each in a folder with its checkpoints, its output and its result.

The result is written last and atomically, so a trial that has it is done.
"""

import contextlib
import functools
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from ladder_lab.bench.sizes import find_size
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.blueprint.model_flags import ModelFlags
from megatron_ladder.blueprint.wiring import WIRING_FIELDS
from megatron_ladder.command_line import flag_words
from megatron_ladder.config.run import RunConfig, parse_run, read_run, resolve_run
from megatron_ladder.errors import ErrorCollector, ExitCode, Problem, UserError
from megatron_ladder.files import write_atomically
from megatron_ladder.processes import end_children, start_child

ROOT = Path(__file__).resolve().parents[3]
STANDARD = "standard"
"""The wiring that all others are compared with."""
TUNING_SEED = 100
"""Seed of the trials that choose a learning rate."""
TRIALS_NAME = "trials"
RESULT_NAME = "result.json"
CHECKPOINTS = "checkpoints"
OUTPUT_NAME = "output.txt"
WARM_UP_SHARE = 0.1
"""Share of a trial's steps in which its learning rate rises."""
LAST_RATE_SHARE = 0.1
"""The rate at the end, as a share of the highest."""
SAVES = 4
"""Checkpoints of a trial while it runs; a killed trial loses the work since the last one."""
LOG_LINES = 100
LAST_LINES = 12
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0
"""Time in which the ranks of a trial save when they are stopped, before they are killed."""
GRACE_SECONDS = 120.0
"""The same for the whole trial."""
_DENSE_FIELDS = tuple(
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_key_value_heads vocab_size".split()
)
_EXPERT_FIELDS = ("num_experts", *(field.name for field in fields(ModelFlags) if field.name.startswith("moe_")))
_REQUIRED = ("--train-iters", "2", "--lr", "1")
_PLACEHOLDERS = (*_REQUIRED, "--num-experts", "2")
_STUDY_FIELDS = (
    *"save load save_interval train_iters seed lr min_lr lr_warmup_iters eval_interval log_interval".split(),
    *("residual_mode", *WIRING_FIELDS, "tie_embeddings"),
    *"seq_length micro_batch_size global_batch_size eval_iters exit_interval".split(),
    *_DENSE_FIELDS,
    *_EXPERT_FIELDS,
)

Kind = Literal["tuning", "tokens", "time"]
"""Purpose of a trial: choose a learning rate, or compare at equal tokens or time."""


@dataclass(frozen=True)
class Trial:
    """One training run."""

    kind: Kind
    size: str
    wiring: str
    seed: int
    learning_rate: float
    iterations: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        words = [self.kind, self.size, self.wiring, f"seed{self.seed}", f"lr{self.learning_rate:g}"]
        return "-".join([*words, f"it{self.iterations}"])


@dataclass(frozen=True)
class Request:
    """How the trials of a study are trained: common flags by field, those after --, and those of the default corpus."""

    output_dir: Path
    common: Mapping[str, int]
    evaluations: int
    training_flags: tuple[str, ...] = ()
    data_flags: tuple[str, ...] = ()
    launcher: str | None = None

    def folder(self, trial: Trial) -> Path:
        """Return the folder of a trial."""
        return self.output_dir / TRIALS_NAME / trial.name

    def checkpoints(self, trial: Trial) -> Path:
        """Return the directory of a trial's checkpoints."""
        return self.folder(trial) / CHECKPOINTS


@functools.cache
def read_training_flags(words: tuple[str, ...]) -> Mapping[str, Any]:
    """Parse the flags after -- as the trainer does, with placeholders for its required flags."""
    return parse_run([*_PLACEHOLDERS, *words]).values


def training_flag_errors(words: Sequence[str]) -> list[Problem]:
    """Return one problem for each flag after -- that the trainer does not know, or that a study sets."""
    errors = ErrorCollector()
    with errors.collect():
        parse_run([*_PLACEHOLDERS, *words])
    # Without the placeholders; by field, so that aliases, negations and the file of --config count as well.
    settings = read_run(words)
    problem = "a study sets this flag for each trial: remove it, see --help"
    set_twice = [name for name in _STUDY_FIELDS if name in {*settings.given, *settings.texts}]
    errors.add(*(Problem({name: None}, "{} after --", problem) for name in set_twice))
    return errors.problems


def common_flags(request: Request) -> tuple[str, ...]:
    """Return the flags that all trials share, without those of the data."""
    schedule = "--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0".split()
    return (*flag_words(request.common), *schedule, *request.training_flags)


def _size_flags(size: str) -> list[str]:
    shape = vars(find_size(size).to_flags())
    changed = {name: value for name, value in shape.items() if value != getattr(ModelFlags, name)}
    # With --load, the trainer requires the sizes. Its models have as many positions as a sample.
    sizes = {name: shape[name] for name in _DENSE_FIELDS}
    return flag_words(sizes | changed | {"max_position_embeddings": None})


def resolve_size(request: Request, size: str) -> ModelConfig:
    """Return the standard model of a size as the trainer resolves it with the flags after --.

    Raises UserError with one message per invalid value.
    """
    settings = parse_run([*_REQUIRED, *_size_flags(size), *common_flags(request)])
    return resolve_run(settings, find_size(size).vocab_size, _processes(settings.values)).model


def _processes(values: Mapping[str, Any]) -> int:
    return values["tensor_model_parallel_size"] * values["pipeline_model_parallel_size"]


def trial_flags(request: Request, trial: Trial) -> list[str]:
    """Return the trainer's flags of a trial that starts from scratch, or resumes."""
    rate = trial.learning_rate
    iterations = trial.iterations
    checkpoints = request.checkpoints(trial)
    schedule = {
        "seed": trial.seed,
        "train_iters": iterations,
        "lr": f"{rate:g}",
        "min_lr": f"{LAST_RATE_SHARE * rate:g}",
        "lr_warmup_iters": min(round(WARM_UP_SHARE * iterations), iterations - 1),
        "eval_interval": math.ceil(iterations / request.evaluations),
        "log_interval": max(1, iterations // LOG_LINES),
        "save_interval": math.ceil(iterations / SAVES),
        "keep_last_n_checkpoints": 2,
        "save": checkpoints,
        "load": checkpoints,
    }
    wiring = NAMED_WIRINGS[trial.wiring]
    tensor_parallel = read_training_flags(request.training_flags)["tensor_model_parallel_size"]
    ranks = max(tensor_parallel, wiring.fewest_ranks)
    return [
        *_size_flags(trial.size),
        *wiring.flags(resolve_size(request, trial.size), ranks),
        *flag_words(schedule),
        *request.data_flags,
        *(["--tensor-model-parallel-size", str(ranks)] if tensor_parallel < ranks else []),
        *common_flags(request),
    ]


def transferred_rate(rate: float, source: str, target: str) -> float:
    """Return the learning rate of a size, given that of another one: it falls with the hidden size."""
    ratio = find_size(source).hidden_size / find_size(target).hidden_size
    # Names and command lines of trials contain it.
    return float(f"{rate * ratio:.3g}")


def resolve_trial(request: Request, trial: Trial) -> RunConfig:
    """Resolve a trial as the trainer will; raises UserError with one message per invalid value."""
    settings = parse_run(trial_flags(request, trial))
    return resolve_run(settings, find_size(trial.size).vocab_size, _processes(settings.values))


def training_command(request: Request, flags: Sequence[str], ranks: int) -> list[str]:
    """Return the command of a trial: through the launcher, or as one or several processes on this machine."""
    program = str(ROOT / "pretrain_ladder.py")
    if request.launcher is not None:
        return [*shlex.split(request.launcher), program, *flags]
    if ranks == 1:
        return [sys.executable, program, *flags]
    script = (
        f"import sys; sys.path.append({str(ROOT)!r}); from megatron_ladder.comm.ranks import run_ranks; "
        f"run_ranks('megatron_ladder.cli.pretrain', sys.argv[1:], {ranks}, {STOP_SECONDS})"
    )
    return [sys.executable, "-P", "-c", script, *flags]


class StudyStopped(Exception):
    """A signal requested the end."""


@dataclass
class TrialRunner:
    """Runs trials `jobs` processes at a time, and collects their results and one message for each failed one."""

    request: Request
    jobs: int
    received: Sequence[int]
    """Signals that arrived; the first one stops the trials, which save before."""
    results: dict[Trial, dict[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def run(self, trials: Iterable[Trial]) -> None:
        """Run what has no result; raise StudyStopped after a signal."""
        missing = [trial for trial in trials if not self._collect(trial)]

        @functools.cache
        def processes(trial: Trial) -> int:
            return resolve_trial(self.request, trial).world_size if self.request.launcher is None else 1

        def run_one(trial: Trial) -> None:
            if not self._can_resume(trial):
                shutil.rmtree(self.request.checkpoints(trial), ignore_errors=True)
            flags = trial_flags(self.request, trial)
            output = self.request.folder(trial) / OUTPUT_NAME
            code = self.execute(training_command(self.request, flags, processes(trial)), output)
            if self._collect(trial, flags, code):
                print(f"{trial.name}: validation loss {self.results[trial]['validation'][-1][1]:.4f}", flush=True)
            elif not self.received:
                print(f"{trial.name}: failed; the end of {output}:\n{last_lines(output)}", flush=True)
                self.failures.append(f"{trial.name}: exit code {code}, or no last validation loss: see {output}")

        for ranks, group in groupby(sorted(missing, key=processes), key=processes):
            with ThreadPoolExecutor(max(1, self.jobs // ranks)) as pool:
                list(pool.map(run_one, group))
        if self.received:
            raise StudyStopped

    def execute(self, command: Sequence[str], output: Path) -> int:
        """Run a command with one thread to its end, or until a signal arrives, and return its exit code."""
        if self.received:
            return -self.received[0]
        output.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ) if self.request.launcher is not None else {**os.environ, "OMP_NUM_THREADS": "1"}
        # In a new session, so that Ctrl-C does not reach the job, which is stopped here.
        with open(output, "ab") as file:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            child = start_child(command, env=environment, start_new_session=True, **streams)
        try:
            while child.poll() is None and not self.received:
                time.sleep(POLL_SECONDS)
        finally:
            end_children([child], GRACE_SECONDS, kill_groups=True, is_impatient=lambda: len(self.received) > 1)
        return child.returncode

    def _can_resume(self, trial: Trial) -> bool:
        """Return whether a trial's checkpoints are not of its last step, after which it would not evaluate again."""
        return not (self.request.checkpoints(trial) / f"iter_{trial.iterations:07d}").is_dir()

    def _collect(self, trial: Trial, flags: Sequence[str] = (), code: int = 0) -> bool:
        """Return whether a trial is done. If so, store its result, and remove its checkpoints."""
        folder = self.request.folder(trial)
        with contextlib.suppress(FileNotFoundError):
            self.results[trial] = _read_result(folder / RESULT_NAME)
            return True
        result = _result_of(trial, self.request.checkpoints(trial), code)
        if result is None:
            return False
        # Stored like the others: JSON has no tuples.
        self.results[trial] = json.loads(json.dumps({"trial": asdict(trial), **result, "flags": list(flags)}))
        write_atomically(folder / RESULT_NAME, json.dumps(self.results[trial], indent=1) + "\n")
        shutil.rmtree(folder / CHECKPOINTS)
        return True


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of a study's finished trials, in the order of their folders' names."""
    return [_read_result(path) for path in sorted((folder / TRIALS_NAME).glob(f"*/{RESULT_NAME}"))]


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError:
        raise UserError(f"{path}: is not JSON: remove it, so that its trial runs again") from None
    return result


def _result_of(trial: Trial, checkpoints: Path, code: int) -> dict[str, Any] | None:
    """Return the curve of validation losses and the speed; None if the finished model is not evaluated.

    A trial that tries a learning rate and ends with bad numbers has an infinite loss.
    """
    # Imported here because the trainer's modules are heavy.
    from megatron_ladder.train.record import read_record

    try:
        events = read_record(checkpoints)
    except FileNotFoundError:
        return None
    # Steps that were repeated after an interruption count once.
    losses = {event["iteration"]: float(event["loss"]) for event in events if event["event"] == "evaluation"}
    if code == ExitCode.BAD_NUMBERS and trial.kind == "tuning":
        losses[trial.iterations] = math.inf
    if trial.iterations not in losses:
        return None
    speeds = [event["tokens_per_second"] for event in events if event["event"] == "progress"]
    return {
        "validation": sorted((step, loss if math.isfinite(loss) else math.inf) for step, loss in losses.items()),
        "tokens_per_second": statistics.median(speeds) if speeds else 0.0,
    }


def last_lines(path: Path) -> str:
    """Return the end of a job's output, indented."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(f"    {line}" for line in lines)
