"""The loss of one or several runs, from their TensorBoard files to a PNG."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import parse_command_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN_LOSS = "train/lm loss"
VALID_LOSS = "valid/lm loss"
THROUGHPUT = "speed/tokens per second"


@dataclass(frozen=True)
class PlotLossConfig:
    """Input and output."""

    tensorboard_dir: tuple[Path, ...]
    """Directories with TensorBoard event files, one for each run."""
    labels: tuple[str, ...] = ()
    """Names of the runs in the legend, as many as directories (default: the directories' own)."""
    output: Path = Path("loss.png")
    """Image to write; the ending chooses the kind (.png, .pdf, .svg)."""
    title: str = "Language model loss"
    """Heading of the picture."""
    smoothing: float = 0.6
    """How much less a point counts in the bold line's average for each point that it is away, from 0 (no
    smoothing) to below 1."""


@dataclass(frozen=True)
class Curve:
    """A scalar over iterations, ascending."""

    iterations: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """What is drawn of one run. Losses are in nats per token."""

    label: str
    train_loss: Curve
    valid_loss: Curve | None
    tokens_per_second: Curve | None


def read_run(directory: Path, label: str) -> Run:
    """Reads the event files of a directory.

    Raises:
        UserError: the directory holds no event file, or none of them has the training loss.
    """
    if not directory.is_dir():
        raise UserError(f"--tensorboard-dir {directory}: no such directory")
    events = EventAccumulator(str(directory), size_guidance={SCALARS: 0})
    events.Reload()
    tags: list[str] = events.Tags()[SCALARS]
    if TRAIN_LOSS not in tags:
        found = f"scalars are {', '.join(tags)}" if tags else "there are no scalars"
        raise UserError(f"--tensorboard-dir {directory}: no '{TRAIN_LOSS}' in its event files, {found}")
    return Run(
        label,
        _read_curve(events, TRAIN_LOSS),
        _read_curve(events, VALID_LOSS) if VALID_LOSS in tags else None,
        _read_curve(events, THROUGHPUT) if THROUGHPUT in tags else None,
    )


def _read_curve(events: EventAccumulator, tag: str) -> Curve:
    """A resumed run repeats iterations that were not saved; what was written last counts."""
    written = sorted(events.Scalars(tag), key=lambda event: event.wall_time)
    by_iteration = dict(sorted({event.step: event.value for event in written}.items()))
    return Curve(tuple(by_iteration), tuple(by_iteration.values()))


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Average of all values, each weighted by `weight ** distance` to both sides.

    It looks both ways because an average of the past alone lags behind a loss that falls, and would stand
    above the validation loss. A value that is not finite is left out of the average and kept in its place.
    """
    before = _decaying_sums(values, weight)
    after = _decaying_sums(values[::-1], weight)[::-1]
    return [
        (past + future - value) / (past_mass + future_mass - 1) if math.isfinite(value) else value
        for value, (past, past_mass), (future, future_mass) in zip(values, before, after, strict=True)
    ]


def _decaying_sums(values: Sequence[float], weight: float) -> list[tuple[float, float]]:
    """At each value, the weighted sum of it and all before it, and the sum of the weights."""
    sums = []
    total = mass = 0.0
    for value in values:
        finite = math.isfinite(value)
        total = weight * total + (value if finite else 0.0)
        mass = weight * mass + finite
        sums.append((total, mass))
    return sums


def draw(runs: Sequence[Run], title: str, smoothing: float) -> "Figure":
    """Loss over iterations, and below it tokens per second if any run has them."""
    # Not above: matplotlib comes with the extra [plot], and its absence deserves a sentence.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with_throughput = any(run.tokens_per_second for run in runs)
    figure = Figure(figsize=(9, 7 if with_throughput else 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        2 if with_throughput else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 1][: 1 + with_throughput]
    )[:, 0]
    for number, run in enumerate(runs):
        _draw_loss(axes[0], run, f"C{number}", smoothing)
        if run.tokens_per_second:
            curve = run.tokens_per_second
            axes[1].plot(curve.iterations, curve.values, color=f"C{number}", linewidth=1)
    axes[0].set_title(title)
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].legend()
    if with_throughput:
        axes[1].set_ylabel("tokens/s")
        axes[1].set_ylim(0, 1.15 * axes[1].dataLim.ymax)
    axes[-1].set_xlabel("iteration")
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure


def _draw_loss(axis: "Axes", run: Run, color: str, smoothing: float) -> None:
    train = run.train_loss
    if smoothing > 0:
        axis.plot(train.iterations, train.values, color=color, alpha=0.25, linewidth=0.8)
    bold = smooth(train.values, smoothing)
    axis.plot(train.iterations, bold, color=color, label=f"{run.label}: training")
    if run.valid_loss:
        valid = run.valid_loss
        axis.plot(
            valid.iterations,
            valid.values,
            color=color,
            linestyle="--",
            marker="o",
            markersize=4,
            label=f"{run.label}: validation",
        )


def parse_options(argv: Sequence[str]) -> PlotLossConfig:
    """Reads the command line.

    Raises:
        UserError: a line for each mistake.
    """
    config: PlotLossConfig
    (config,) = parse_command_line(
        [PlotLossConfig], argv, program="plot_loss.py", description="Draws loss curves from TensorBoard files."
    )
    mistakes = []
    if config.labels and len(config.labels) != len(config.tensorboard_dir):
        mistakes.append(
            f"--labels: found {len(config.labels)}, expected one for each of the "
            f"{len(config.tensorboard_dir)} directories of --tensorboard-dir"
        )
    if not 0 <= config.smoothing < 1:
        mistakes.append(f"--smoothing {config.smoothing}: expected at least 0 and less than 1")
    if config.output.suffix not in (".png", ".pdf", ".svg"):
        mistakes.append(f"--output {config.output}: expected a name that ends in .png, .pdf or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        mistakes.append("matplotlib is not installed: pip install matplotlib")
    if mistakes:
        raise UserError(*mistakes)
    return config


def main(argv: Sequence[str]) -> None:
    """Reads the command line and draws the picture."""
    mistakes: list[str] = []
    config = parse_options(argv)
    labels = config.labels or tuple(directory.resolve().name for directory in config.tensorboard_dir)
    runs = []
    for directory, label in zip(config.tensorboard_dir, labels, strict=True):
        try:
            runs.append(read_run(directory, label))
        except UserError as error:
            mistakes.extend(error.mistakes)
    if mistakes:
        raise UserError(*mistakes)
    config.output.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, config.title, config.smoothing).savefig(config.output, dpi=120)
    for run in runs:
        last, value = run.train_loss.iterations[-1], run.train_loss.values[-1]
        print(f"{run.label}: training loss {value:.4f} at iteration {last}")
    print(f"plot: {config.output}")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
