"""The options of `tools/study.py`; the defaults are a study that takes about three hours on two cores."""

from dataclasses import dataclass
from pathlib import Path

from ladder_lab.bench.options import FEWEST_ROUNDS
from ladder_lab.bench.sizes import SHAPE, SIZES
from ladder_lab.study.wirings import DEFAULT_WIRINGS
from ladder_lab.wirings import NAMED_WIRINGS
from megatron_ladder.flags import flag

OWN_LINK = "own"
"""Value of --link that selects the interconnect of the trials."""
NONE = "none"
"""Value of --timed-wirings that selects no wiring."""


@dataclass(frozen=True)
class RunOptions:
    """Study. Flags after -- (parallelism, precision, data) are passed to pretrain_ladder.py for every trial."""

    output_dir: Path = flag(output="directory")
    """Folder of the study. A study with the same settings in this folder is resumed; --wirings, --timed-wirings and
    --seeds can have further values."""
    report_dir: Path | None = flag(None, output="directory")
    """Folder for report.md and its pictures; --output-dir if not given."""
    small: bool = False
    """Use smaller defaults, for a test of the whole program in about ten minutes on two cores. The results are not
    meaningful."""
    wirings: tuple[str, ...] = flag(DEFAULT_WIRINGS, choices=NAMED_WIRINGS)
    """Wirings to compare. hybrid is ladder in the upper half of the layers. own-partials-N is ladder of staleness N in
    which every rank is a lane (--lanes); like desync-2x and desync-4x it runs on two tensor-parallel ranks, and so
    takes two slots of --jobs."""
    timed_wirings: tuple[str, ...] = flag((), choices=(*NAMED_WIRINGS, NONE))
    """Wirings of --wirings that are also trained for the time that standard takes, or none; all if not given."""
    sizes: tuple[str, ...] = flag(("12x32x96x2x2x512",), details=f"Names: {', '.join(SIZES)}; numbers: {SHAPE}.")
    """Shapes of the model, by name or in numbers. The default corpus gets the vocabulary of the size."""
    seeds: tuple[int, ...] = flag((1, 2, 3), minimum=0)
    """Seeds. Trials with the same seed share initial weights and order of data."""
    iterations: int = flag(944, minimum=1)
    """Steps at equal tokens, and of standard at equal time."""
    seq_length: int = flag(128, minimum=1)
    """Tokens of a sample."""
    micro_batch_size: int = flag(32, minimum=1)
    """Samples that a process computes at once; also the batch of a timed step."""
    global_batch_size: int = flag(32, minimum=1)
    """Samples of a step."""
    learning_rates: tuple[float, ...] = flag((8e-3, 1.6e-2, 3.2e-2), above=0)
    """Highest learning rates to try for every wiring, and up to three further ones if the best is at the edge. The rate
    with the lowest final validation loss is used; a single rate is used without a trial."""
    learning_rates_from: Path | None = flag(None, excludes="--learning-rates")
    """Folder of a finished study, usually of a smaller model: instead of trying --learning-rates, use its rate of each
    wiring, times the ratio of its hidden size to that of the model."""
    tuning_iterations: int | None = flag(None, minimum=1)
    """Steps of a trial that tries a learning rate; --iterations if not given. A shorter run may favour another rate."""
    tuning_seed: int = flag(100, minimum=0)
    """Seed of those trials; it must not be one of --seeds."""
    warm_up_share: float = flag(0.1, minimum=0, below=1)
    """Share of a trial's steps in which its learning rate rises."""
    last_rate_share: float = flag(0.1, minimum=0, maximum=1)
    """Lowest learning rate, at the end of the cosine, as a share of the highest."""
    evaluations: int = flag(7, minimum=1)
    """Evaluations of a trial, evenly spaced; the last one evaluates the finished model."""
    eval_iters: int = flag(24, minimum=1)
    """Steps' worth of samples in one evaluation."""
    saves: int = flag(4, minimum=1)
    """Checkpoints of a trial while it runs; a killed trial loses the work since the last one."""
    link: str = "1.2c"
    """Interconnect of the trials at equal time: the time of one all-reduce on an emulated wire between
    --timing-ranks processes of this machine, as multiples of the computation of the mean sub-block (1.2c), or
    absolute (2ms). own uses the tokens per second of the trials at equal tokens, for a cluster whose interconnect is
    the one to compare on."""
    timing_ranks: int = flag(2, minimum=2)
    """Tensor-parallel processes of the timed steps."""
    timing_rounds: int = flag(15, minimum=FEWEST_ROUNDS)
    """Rounds of the timed steps; every wiring runs once in each."""
    jobs: int = flag(2, minimum=1)
    """Processes with one thread each that run at the same time. With --launcher: trials at the same time."""
    launcher: str | None = None
    """Command to put before pretrain_ladder.py, such as "deepspeed --hostfile hosts"; combine it with --jobs 1."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of finished trials at equal tokens and time, which are otherwise removed."""


@dataclass(frozen=True)
class SmallRunOptions(RunOptions):
    """Study, small. A test of the whole program in minutes; its results are not meaningful."""

    sizes: tuple[str, ...] = ("8x64x192x4x4x1024",)
    seeds: tuple[int, ...] = flag((1, 2), minimum=0)
    iterations: int = flag(60, minimum=1)
    micro_batch_size: int = flag(8, minimum=1)
    global_batch_size: int = flag(8, minimum=1)
    learning_rates: tuple[float, ...] = flag((4e-3, 8e-3), above=0)
    tuning_iterations: int | None = flag(20, minimum=1)
    evaluations: int = flag(3, minimum=1)
    eval_iters: int = flag(4, minimum=1)
    saves: int = flag(2, minimum=1)
    timing_rounds: int = flag(7, minimum=FEWEST_ROUNDS)


@dataclass(frozen=True)
class AdaptOptions:
    """Adaptation. The layers of the standard models to rewire, and the healing runs."""

    adapt_layers: tuple[int, ...] = flag((), minimum=0)
    """Numbers of upper layers that become ladder; a quarter, a half, three quarters and all of them if not given. The
    control with none is always included."""
    healing_percent: tuple[int, ...] = flag((1, 3, 10), minimum=1, maximum=100)
    """Lengths of healing, in percent of --iterations; each is a separate run."""
    healing_rate_share: float = flag(0.1, above=0)
    """Highest learning rate of every healing run, as a share of that of the standard models."""


@dataclass(frozen=True)
class Request:
    """A command line of `run` or `adapt`, with the words after -- and the trainer's flags of the default corpus."""

    options: RunOptions
    training_flags: tuple[str, ...]
    adapt: AdaptOptions | None = None
    command: tuple[str, ...] = ()
    data_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportOptions:
    """Report. Write report.md and its pictures again."""

    output_dir: Path = flag(output="directory")
    """Folder of the study."""
    report_dir: Path | None = flag(None, output="directory")
    """Folder for report.md and its pictures; --output-dir if not given."""
    compare_with: Path | None = None
    """Folder of a repetition of the study: also print whether its losses are within the spread of this study's."""
