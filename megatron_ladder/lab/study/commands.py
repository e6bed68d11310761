"""The commands that a study starts, and their flags."""

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.config.run import RunConfig, RunFlags, parse_run, resolve_run
from megatron_ladder.flags import flag_name
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.study.description import TRIALS_NAME, Study
from megatron_ladder.lab.study.options import Request, RunOptions
from megatron_ladder.lab.study.outcome import CHECKPOINTS
from megatron_ladder.lab.study.trial import Trial
from megatron_ladder.lab.study.wirings import fewest_ranks, wiring_flags

ROOT = Path(__file__).resolve().parents[3]
LOG_LINES = 100
"""Points of a trial's training curve."""
STOP_SECONDS = 60.0
"""Time in which the ranks of a trial save when they are stopped."""
SHAPE_FIELDS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
STUDY_FIELDS = (
    "save", "load", "save_interval", "train_iters", "seed", "lr", "min_lr", "lr_warmup_iters", "eval_interval",
    "log_interval", "residual_mode", "ladder_layers", "residual_staleness", "desync_interval", "tie_embeddings",
    "seq_length", "micro_batch_size", "global_batch_size", "eval_iters", "exit_interval", *SHAPE_FIELDS,
)  # fmt: skip
"""Fields of the trainer that a study sets for each trial."""
DATA_FIELDS = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "streaming")
"""Fields of the trainer that name the training data."""


def _program(script: str, entry: str) -> Path:
    """Return the path of a program: the script in a checkout, or the one installed next to the interpreter."""
    installed = Path(sys.executable).with_name(f"megatron-ladder-{entry}")
    return ROOT / script if (ROOT / script).is_file() else installed


def common_flags(request: Request) -> tuple[str, ...]:
    """Return the flags that all trials share, without those of the data."""
    options = request.options
    return (
        *f"--seq-length {options.seq_length} --micro-batch-size {options.micro_batch_size}".split(),
        *f"--global-batch-size {options.global_batch_size} --eval-iters {options.eval_iters}".split(),
        *"--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0".split(),
        *request.training_flags,
    )


def _trial_flags(request: Request, data_flags: Sequence[str], trial: Trial) -> list[str]:
    """Return the whole command line of the trainer."""
    options = request.options
    shape = find_size(trial.size)
    save, iterations, rate = str(folder_of(options, trial) / CHECKPOINTS), trial.iterations, trial.learning_rate
    warm_up = min(round(options.warm_up_share * iterations), iterations - 1)
    numbers = {
        "seed": trial.seed,
        "train_iters": iterations,
        "lr": f"{rate:g}",
        "min_lr": f"{options.last_rate_share * rate:g}",
        "lr_warmup_iters": warm_up,
        "eval_interval": math.ceil(iterations / options.evaluations),
        "log_interval": max(1, iterations // LOG_LINES),
        "save_interval": math.ceil(iterations / options.saves),
        "keep_last_n_checkpoints": 2,
    }
    return [
        *_shape_flags(shape),
        *wiring_flags(trial.wiring, shape.num_layers),
        *(word for name, value in numbers.items() for word in (flag_name(name), str(value))),
        *("--save", save, "--load", save),
        *data_flags,
        *_tensor_parallel_flags(request, fewest_ranks(trial.wiring)),
        *common_flags(request),
    ]


def _shape_flags(shape: ModelConfig) -> list[str]:
    words = [word for name in SHAPE_FIELDS for word in (flag_name(name), str(getattr(shape, name)))]
    return [*words, *["--tie-embeddings"] * shape.tie_embeddings]


def _tensor_parallel_flags(request: Request, ranks: int) -> list[str]:
    """Raise the number of ranks for a wiring that needs more than the given ones."""
    given = read_training_flags(request.training_flags, []).parallel.tensor_model_parallel_size
    return ["--tensor-model-parallel-size", str(ranks)] if given < ranks else []


def read_training_flags(words: Sequence[str], errors: list[str]) -> RunFlags:
    """Parse the flags after -- as the trainer does, with placeholders for its required flags."""
    return parse_run(["--train-iters", "2", "--lr", "1", *words], errors)


def training_flag_errors(words: Sequence[str]) -> list[str]:
    """Return one message for each flag after -- that the trainer does not know, or that a study sets."""
    errors: list[str] = []
    read_training_flags(words, errors)
    names = {flag_name(name) for name in STUDY_FIELDS}
    given = [word.partition("=")[0] for word in words]
    problem = "a study sets this flag for each trial: remove it, see --help"
    return errors + [f"{name} after --: {problem}" for name in given if name in names]


def resolve_trial(request: Request, data_flags: Sequence[str], trial: Trial, errors: list[str]) -> RunConfig:
    """Resolve a trial as the trainer will; appends one message per invalid value to `errors`."""
    flags = parse_run(_trial_flags(request, data_flags, trial), errors)
    processes = flags.parallel.tensor_model_parallel_size * flags.parallel.pipeline_model_parallel_size
    return resolve_run(flags, find_size(trial.size).vocab_size, processes, errors)


def training_command(request: Request, data_flags: Sequence[str], trial: Trial, ranks: int) -> tuple[str, ...]:
    """Return the command of a trial: through the launcher, or as one or several processes on this machine."""
    flags = _trial_flags(request, data_flags, trial)
    if request.options.launcher is not None:
        return (*shlex.split(request.options.launcher), str(_program("pretrain_ladder.py", "pretrain")), *flags)
    if ranks == 1:
        return (sys.executable, str(_program("pretrain_ladder.py", "pretrain")), *flags)
    script = (
        f"import sys; sys.path.append({str(ROOT)!r}); from megatron_ladder.comm.ranks import run_ranks; "
        f"run_ranks('megatron_ladder.cli.pretrain', sys.argv[1:], {ranks}, {STOP_SECONDS}, ends_by_signal=True)"
    )
    return (sys.executable, "-P", "-c", script, *flags)


def environment_of(options: RunOptions) -> Mapping[str, str]:
    """Return the environment of a trial: one thread per process, except with a launcher, which decides itself."""
    return dict(os.environ) if options.launcher is not None else {**os.environ, "OMP_NUM_THREADS": "1"}


def folder_of(options: RunOptions, trial: Trial) -> Path:
    """Return the folder of a trial."""
    return options.output_dir / TRIALS_NAME / trial.name


def timing_command(options: RunOptions, study: Study, size: str, output: Path) -> tuple[str, ...]:
    """Return the command of the benchmark that times the wirings of a size and writes its rows to a file."""
    flags = {
        "--tp": options.timing_ranks,
        "--sizes": size,
        "--batch": options.micro_batch_size,
        "--sequence": options.seq_length,
        "--alpha": options.link,
        "--rounds": options.timing_rounds,
        "--json": output,
        "--wirings": ",".join(study.timed_wirings),
    }
    words = (str(word) for pair in flags.items() for word in pair)
    return (sys.executable, str(_program("tools/benchmark.py", "benchmark")), "train", *words)
