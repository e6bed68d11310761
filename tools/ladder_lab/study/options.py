"""The command line of `tools/study.py`; the defaults of `run` are a study that takes about three hours on two cores."""

import importlib.util
import itertools
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder_lab.bench.options import parse_alpha
from ladder_lab.bench.sizes import SHAPE, SIZES, find_size
from ladder_lab.study.trials import (
    STANDARD,
    TUNING_SEED,
    Request,
    Trial,
    resolve_size,
    resolve_trial,
    training_flag_errors,
)
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.blueprint.model import tensor_parallel_errors
from megatron_ladder.blueprint.tensors import active_parameters
from megatron_ladder.command_line import parse_command_line, take_subcommand
from megatron_ladder.errors import ErrorCollector, Problem, UserError, raise_user_errors
from megatron_ladder.flags import flag, flag_name

OWN_LINK = "own"
"""Value of --link that selects the interconnect of the trials."""
NONE = "none"
"""Value of --timed-wirings that selects no wiring."""
DEFAULT_WIRINGS = (STANDARD, "parallel", "ladder", "ladder-parallel", "staleness-2", "desync-2x", "own-partials-1")
DESCRIPTIONS = {
    "run": "Train a grid of wirings and seeds, at equal tokens and at equal time, and report on it. Resumes a stopped "
    "study.",
    "report": "Report on the finished trials of a study.",
}


@dataclass(frozen=True)
class TrainingOptions:
    """Trials. Flags after -- (parallelism, precision, data) are passed to pretrain_ladder.py for every trial."""

    output_dir: Path = flag(output="directory")
    """Folder of the study. A study with the same settings in this folder is resumed."""
    seeds: tuple[int, ...] = flag((1, 2, 3), minimum=0)
    """Seeds. Trials with the same seed share initial weights and order of data. Further ones can be added later."""
    iterations: int = flag(944, minimum=1)
    """Steps at equal tokens, and of standard at equal time."""
    tokens_per_parameter: float | None = flag(None, above=0, excludes="iterations")
    """Tokens at equal tokens, as a multiple of the parameters that a token uses, so that larger sizes train longer."""
    seq_length: int = flag(128, minimum=1)
    """Tokens of a sample."""
    micro_batch_size: int = flag(32, minimum=1)
    """Samples that a process computes at once; also the batch of a timed step."""
    global_batch_size: int = flag(32, minimum=1)
    """Samples of a step."""
    learning_rates: tuple[float, ...] = flag((8e-3, 1.6e-2, 3.2e-2), above=0)
    """Highest learning rates to try for every wiring, and up to three further ones if the best is at the edge. The rate
    with the lowest final validation loss is used; a single rate is used without a trial."""
    transfer_rates: bool = False
    """Choose rates for the two narrowest sizes only; at the others, a wiring trains at the rate of the second times the
    ratio of their hidden sizes. The report shows how well the narrowest predicts the second."""
    evaluations: int = flag(7, minimum=1)
    """Evaluations of a trial, evenly spaced; the last one evaluates the finished model."""
    eval_iters: int = flag(24, minimum=1)
    """Steps' worth of samples in one evaluation."""
    jobs: int = flag(2, minimum=1)
    """Processes with one thread each that run at the same time. With --launcher: trials at the same time."""
    launcher: str | None = None
    """Command to put before pretrain_ladder.py, such as "deepspeed --hostfile hosts"; combine it with --jobs 1."""


@dataclass(frozen=True)
class GridOptions:
    """Grid. The models to compare, and the interconnect of the comparison at equal time."""

    wirings: tuple[str, ...] = flag(DEFAULT_WIRINGS, choices=NAMED_WIRINGS)
    """Wirings to compare; further ones can be added later. hybrid is ladder in the upper half of the layers.
    late-linear-attention and late-softmax-attention are ladder-attention in the layers with the one or the other, of
    models that have both.
    own-partials-N is ladder of staleness N in which every rank is a lane (--lanes); like desync-2x and desync-4x it
    runs on two tensor-parallel ranks, and so takes two of --jobs."""
    timed_wirings: tuple[str, ...] = flag((), choices=(*NAMED_WIRINGS, NONE))
    """Wirings of --wirings that are also trained for the time that standard takes, or none; all if not given."""
    sizes: tuple[str, ...] = flag(("12x32x96x2x2x512",), details=f"Names: {', '.join(SIZES)}; numbers: {SHAPE}.")
    """Shapes of the model, by name or in numbers. The default corpus gets the vocabulary of the size."""
    link: str = "1.2c"
    """Interconnect of the trials at equal time: the time of one all-reduce on an emulated wire between
    --timing-ranks processes of this machine, as multiples of the computation of the mean sub-block (1.2c), or
    absolute (2ms). own uses the tokens per second of the trials at equal tokens, for a cluster whose interconnect is
    the one to compare on."""
    timing_ranks: int = flag(2, minimum=2)
    """Tensor-parallel processes of the timed steps."""


@dataclass(frozen=True)
class ReportOptions:
    """Report. Write report.md and its pictures again."""

    output_dir: Path = flag(output="directory")
    """Folder of the study."""


SECTIONS: dict[str, tuple[type, ...]] = {
    "run": (TrainingOptions, GridOptions),
    "report": (ReportOptions,),
}


@dataclass(frozen=True)
class Parsed:
    """A command line of `run`: how its trials are trained, and what it compares."""

    request: Request
    training: TrainingOptions
    grid: GridOptions

    @property
    def timed_wirings(self) -> tuple[str, ...]:
        """The wirings that are also trained at equal time; standard, the reference, is always included."""
        if self.grid.timed_wirings == (NONE,):
            return ()
        return tuple(dict.fromkeys((STANDARD, *(self.grid.timed_wirings or self.grid.wirings))))

    def iterations(self, size: str) -> int:
        """Return the steps of a size at equal tokens."""
        training = self.training
        if training.tokens_per_parameter is None:
            return training.iterations
        tokens = training.tokens_per_parameter * active_parameters(resolve_size(self.request, size))
        return max(1, round(tokens / (training.global_batch_size * training.seq_length)))


def parse_study(argv: Sequence[str]) -> Parsed | ReportOptions:
    """Parse `run|report` and the flags. Raises UserError with one message per error."""
    command, _ = take_subcommand(argv, DESCRIPTIONS, "study.py", "Runs and reports grids of training runs.")
    split = argv.index("--") if "--" in argv and command != "report" else len(argv)
    words = argv[1:split]
    training_flags = tuple(argv[split + 1 :])
    errors: list[str | Problem] = []
    options, *grid = parse_command_line(SECTIONS[command], words, f"study.py {command}", DESCRIPTIONS[command])
    errors += [
        f"{name} is not installed, but reports of studies need it: pip install 'megatron-ladder[{extra}]'"
        for name, extra in {"matplotlib": "plot", "pandas": "lab", "scipy": "lab"}.items()
        if importlib.util.find_spec(name) is None
    ]
    if isinstance(options, ReportOptions):
        raise_user_errors(errors)
        return options
    fields = ("seq_length", "micro_batch_size", "global_batch_size", "eval_iters")
    common = {name: getattr(options, name) for name in fields}
    request = Request(options.output_dir, common, options.evaluations, training_flags, launcher=options.launcher)
    parsed = Parsed(request, options, grid[0])
    errors += [*_find_errors(parsed), *training_flag_errors(training_flags)]
    raise_user_errors(errors)
    # The trainer's checks, which need valid options.
    trainer_errors = ErrorCollector()
    for size, wiring in itertools.product(parsed.grid.sizes, parsed.grid.wirings):
        with trainer_errors.collect():
            if NAMED_WIRINGS[wiring].lacks_layers(resolve_size(request, size)):
                raise UserError(f"--wirings {wiring}: no layer of {size} would read late: leave it out")
            steps = parsed.iterations(size)
            resolve_trial(request, Trial("tokens", size, wiring, 1, max(options.learning_rates), steps))
    trainer_errors.raise_if_any()
    return parsed


def _find_errors(parsed: Parsed) -> Iterator[str]:
    grid = parsed.grid
    yield from _repeated(parsed.training, "seeds", "learning_rates")
    if TUNING_SEED in parsed.training.seeds:
        yield f"--seeds {TUNING_SEED}: is the seed of the trials that choose a learning rate: give another one"
    launcher = parsed.training.launcher
    if launcher is not None:
        program = (shlex.split(launcher) or ["an empty command"])[0]
        if shutil.which(program) is None:
            yield f"--launcher {launcher}: {program} is not an executable program"
    yield from _repeated(grid, "wirings", "timed_wirings", "sizes")
    if invalid := [name for name in parsed.timed_wirings if name not in grid.wirings]:
        yield f"--timed-wirings {' '.join(invalid)}: expected some of --wirings, or {NONE}"
    if STANDARD not in grid.wirings:
        yield f"--wirings {' '.join(grid.wirings)}: add {STANDARD}, with which all others are compared"
    is_emulated = parsed.timed_wirings and grid.link != OWN_LINK
    alpha = parse_alpha(grid.link)
    if is_emulated and (alpha is None or alpha[0] == 0):
        yield f"--link {grid.link}: expected a time such as 1.2c or 2ms, or {OWN_LINK}"
    if parsed.training.transfer_rates and len(grid.sizes) < 3:
        yield f"--transfer-rates: --sizes has {len(grid.sizes)}, expected at least 3: add larger ones"
    for size in grid.sizes:
        try:
            errors = tensor_parallel_errors(find_size(size), grid.timing_ranks if is_emulated else 1)
            yield from (f"--timing-ranks {grid.timing_ranks}: {error}" for error in errors)
        except ValueError as error:
            yield f"--sizes {size}: {error}"


def _repeated(options: Any, *names: str) -> Iterator[str]:
    for name in names:
        values = getattr(options, name)
        for value in dict.fromkeys(value for value in values if values.count(value) > 1):
            yield f"{flag_name(name)} {value}: is given twice"
