"""What can be said to `tools/study.py`, and the numbers of the study that two cores do in three hours."""

from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.lab.study.wirings import DEFAULT_WIRINGS

OWN_LINK = "own"
"""In the place of an interconnect's time: that of the trials."""


@dataclass(frozen=True)
class RunOptions:
    """Study. What stands behind -- (parallelism, precision, data) is given to pretrain_ladder.py for every trial."""

    output_dir: Path
    """Folder of the study. If it holds one with these settings, that goes on where it stopped."""
    report_dir: Path | None = None
    """Folder for report.md and its pictures; --output-dir if not given."""
    small: bool = False
    """Other defaults: everything once over in about ten minutes on two cores. Nothing can be concluded from it."""
    wirings: tuple[str, ...] = DEFAULT_WIRINGS
    """Those to compare: standard, parallel, ladder, ladder-parallel, staleness-2, hybrid (ladder in the upper half of
    the layers) and desync-2x (two tensor-parallel ranks, and so two slots of --jobs)."""
    timed_wirings: tuple[str, ...] = ()
    """Those of them that are also trained for the time that standard takes: standard, parallel, ladder,
    ladder-parallel, staleness-2, which are also the default; none for none."""
    sizes: tuple[str, ...] = ("8x160x448x2x2x2048",)
    """Shapes of the model, in numbers, LAYERSxHIDDENxFFNxHEADSxKEY_VALUE_HEADSxVOCABULARY, or by the names of
    tools/benchmark.py. The corpus that is made here has the vocabulary of the size."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Trials of one seed have the same initial weights and the same order of data."""
    iterations: int = 700
    """Steps at equal tokens, and of standard at equal time."""
    seq_length: int = 256
    """Tokens of a sample."""
    micro_batch_size: int = 8
    """Samples that a process computes at once; also those of a timed step."""
    global_batch_size: int = 8
    """Samples of a step."""
    learning_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """Highest learning rates to try for every wiring, and up to three further ones where the best is at the edge. The
    one with the lowest final validation loss is taken; a single one is taken untried."""
    tuning_iterations: int = 150
    """Steps of a trial that tries a learning rate."""
    tuning_seed: int = 100
    """Seed of those trials, not one of --seeds."""
    warm_up_share: float = 0.1
    """Share of a trial's steps in which its learning rate rises."""
    last_rate_share: float = 0.1
    """Lowest learning rate, at the end of the cosine, as a share of the highest."""
    evaluations: int = 7
    """Evaluations of a trial, evenly spaced; the last one is of the finished model."""
    eval_iters: int = 24
    """Steps' worth of samples in one evaluation."""
    saves: int = 4
    """Checkpoints of a trial while it runs: what it may lose if it is killed."""
    link: str = "1.2c"
    """Interconnect of the trials at equal time: the time of one all-reduce on an emulated wire between
    --timing-ranks processes of this machine, as multiples of the computation of the mean sub-block (1.2c), or
    absolute (2ms); own: the tokens a second of the trials at equal tokens, for a cluster that is the interconnect."""
    timing_ranks: int = 2
    """Tensor-parallel processes of the timed steps."""
    timing_rounds: int = 15
    """Rounds of the timed steps; every wiring runs once in each."""
    jobs: int = 2
    """Processes with one thread each that run side by side; with --launcher, trials side by side, 1 if not more are
    meant."""
    launcher: str | None = None
    """What to put before pretrain_ladder.py, such as "deepspeed --hostfile hosts", or "python tools/run_resilient.py
    -- deepspeed --hostfile hosts" to go on after failures; give --jobs 1 with it."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of finished trials at equal tokens and time, which are removed otherwise."""


@dataclass(frozen=True)
class SmallRunOptions(RunOptions):
    """Study, small. Everything once over in minutes; nothing can be concluded from it."""

    sizes: tuple[str, ...] = ("8x64x192x4x4x1024",)
    seeds: tuple[int, ...] = (1, 2)
    iterations: int = 60
    seq_length: int = 128
    learning_rates: tuple[float, ...] = (4e-3, 8e-3)
    tuning_iterations: int = 20
    evaluations: int = 3
    eval_iters: int = 4
    saves: int = 2
    timing_rounds: int = 7


@dataclass(frozen=True)
class AdaptOptions:
    """Adaptation. Which layers of the standard models are rewired, and how they are healed."""

    adapt_layers: tuple[int, ...] = ()
    """Numbers of upper layers that become ladder; a quarter, a half, three quarters and all of them if not given. The
    control with none is always there."""
    healing_percent: tuple[int, ...] = (1, 3, 10)
    """Lengths of healing, in percent of --iterations; each is a training of its own."""
    healing_rate_share: float = 0.3
    """Highest learning rate of every healing, as a share of that of the standard models."""


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    options: RunOptions
    training_flags: tuple[str, ...]
    """What stood behind --."""
    adapt: AdaptOptions | None = None
    """Of an adaptation."""


@dataclass(frozen=True)
class ReportOptions:
    """Report. Writes report.md and its pictures again."""

    output_dir: Path
    """Folder of the study."""
    report_dir: Path | None = None
    """Folder for report.md and its pictures; --output-dir if not given."""
    compare_with: Path | None = None
    """Folder of the same study, run again: also prints whether its losses lie within the spread of this one's."""
