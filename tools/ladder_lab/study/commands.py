"""The commands that a study starts, and their flags."""

import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from ladder_lab.bench.sizes import find_size
from ladder_lab.study.options import Request, RunOptions
from ladder_lab.study.schema import CHECKPOINTS, TRIALS_NAME, Trial
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder import __version__
from megatron_ladder.config.run import RunConfig, RunFlags, parse_run, resolve_run
from megatron_ladder.flags import flag_name

ROOT = Path(__file__).resolve().parents[3]
LOG_LINES = 100
STOP_SECONDS = 60.0
"""Time in which the ranks of a trial save when they are stopped."""
SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_STUDY_FIELDS = (
    "save",
    "load",
    "save_interval",
    "train_iters",
    "seed",
    "lr",
    "min_lr",
    "lr_warmup_iters",
    "eval_interval",
    "log_interval",
    "residual_mode",
    "ladder_layers",
    "residual_staleness",
    "lanes",
    "desync_interval",
    "tie_embeddings",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "eval_iters",
    "exit_interval",
    *SHAPE_FIELDS,
)


def folder_of(options: RunOptions, trial: Trial) -> Path:
    """Return the folder of a trial."""
    return options.output_dir / TRIALS_NAME / trial.name


def flag_words(values: Mapping[str, object]) -> list[str]:
    """Return the words of a command line that sets fields to values."""
    return [word for name, value in values.items() for word in (flag_name(name), str(value))]


def read_training_flags(words: Sequence[str], errors: list[str]) -> RunFlags:
    """Parse the flags after -- as the trainer does, with placeholders for its required flags."""
    return parse_run(["--train-iters", "2", "--lr", "1", *words], errors)


def training_flag_errors(words: Sequence[str]) -> list[str]:
    """Return one message for each flag after -- that the trainer does not know, or that a study sets."""
    errors: list[str] = []
    read_training_flags(words, errors)
    # Without the placeholders; by field, so that aliases, negations and the file of --config count as well.
    given = parse_run(words, []).given
    problem = "a study sets this flag for each trial: remove it, see --help"
    return errors + [f"{flag_name(name)} after --: {problem}" for name in _STUDY_FIELDS if name in given]


def describe_machine() -> dict[str, str]:
    """Return processor, cores, versions, and the GPUs if there are any."""
    processor, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    found = {"processor": processor, "cores": str(len(os.sched_getaffinity(0))), "python": platform.python_version()}
    found |= {"megatron_ladder": __version__, "torch": version("torch"), "deepspeed": version("deepspeed")}
    if tool := shutil.which("nvidia-smi"):
        command = [tool, "--query-gpu=name", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60)
        names = listed.stdout.splitlines() if listed.returncode == 0 else []
        if names:
            found["gpus"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return found


def common_flags(request: Request) -> tuple[str, ...]:
    """Return the flags that all trials share, without those of the data."""
    names = ("seq_length", "micro_batch_size", "global_batch_size", "eval_iters")
    return (
        *flag_words({name: getattr(request.options, name) for name in names}),
        *"--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0".split(),
        *request.training_flags,
    )


def _trial_flags(request: Request, trial: Trial) -> list[str]:
    options, shape = request.options, find_size(trial.size)
    save, iterations, rate = folder_of(options, trial) / CHECKPOINTS, trial.iterations, trial.learning_rate
    schedule = {
        "seed": trial.seed,
        "train_iters": iterations,
        "lr": f"{rate:g}",
        "min_lr": f"{options.last_rate_share * rate:g}",
        "lr_warmup_iters": min(round(options.warm_up_share * iterations), iterations - 1),
        "eval_interval": math.ceil(iterations / options.evaluations),
        "log_interval": max(1, iterations // LOG_LINES),
        "save_interval": math.ceil(iterations / options.saves),
        "keep_last_n_checkpoints": 2,
        "save": save,
        "load": save,
    }
    wiring = NAMED_WIRINGS[trial.wiring]
    given = read_training_flags(request.training_flags, []).parallel.tensor_model_parallel_size
    ranks = max(given, wiring.fewest_ranks)
    return [
        *flag_words({name: getattr(shape, name) for name in SHAPE_FIELDS}),
        *["--tie-embeddings"] * shape.tie_embeddings,
        *wiring.flags(shape.num_layers, ranks),
        *flag_words(schedule),
        *request.data_flags,
        *(["--tensor-model-parallel-size", str(ranks)] if given < ranks else []),
        *common_flags(request),
    ]


def resolve_trial(request: Request, trial: Trial, errors: list[str]) -> RunConfig:
    """Resolve a trial as the trainer will; appends one message per invalid value to `errors`."""
    flags = parse_run(_trial_flags(request, trial), errors)
    processes = flags.parallel.tensor_model_parallel_size * flags.parallel.pipeline_model_parallel_size
    return resolve_run(flags, find_size(trial.size).vocab_size, processes, errors)


def training_command(request: Request, trial: Trial, ranks: int) -> tuple[str, ...]:
    """Return the command of a trial: through the launcher, or as one or several processes on this machine."""
    flags, program = _trial_flags(request, trial), str(ROOT / "pretrain_ladder.py")
    if request.options.launcher is not None:
        return (*shlex.split(request.options.launcher), program, *flags)
    if ranks == 1:
        return (sys.executable, program, *flags)
    script = (
        f"import sys; sys.path.append({str(ROOT)!r}); from megatron_ladder.comm.ranks import run_ranks; "
        f"run_ranks('megatron_ladder.cli.pretrain', sys.argv[1:], {ranks}, {STOP_SECONDS}, ends_by_signal=True)"
    )
    return (sys.executable, "-P", "-c", script, *flags)


def environment_of(options: RunOptions) -> Mapping[str, str]:
    """Return the environment of a trial: one thread per process, except with a launcher, which decides itself."""
    return dict(os.environ) if options.launcher is not None else {**os.environ, "OMP_NUM_THREADS": "1"}


def timing_command(options: RunOptions, wirings: Sequence[str], size: str, output: Path) -> tuple[str, ...]:
    """Return the command of the benchmark that times wirings at a size and writes its rows to a file."""
    values = {
        "tp": options.timing_ranks,
        "sizes": size,
        "batch": options.micro_batch_size,
        "sequence": options.seq_length,
        "alpha": options.link,
        "rounds": options.timing_rounds,
        "json": output,
        "wirings": ",".join(wirings),
    }
    return (sys.executable, str(ROOT / "tools" / "benchmark.py"), "train", *flag_words(values))
