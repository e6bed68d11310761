"""Draws the loss curves of training runs from their TensorBoard files."""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_ladder.cli.images import image_errors
from megatron_ladder.cli.programs import Command
from megatron_ladder.command_line import parse_config
from megatron_ladder.errors import ErrorCollector, UserError, run_program
from megatron_ladder.flags import flag

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TRAIN_LOSS = "train/lm loss"
VALID_LOSS = re.compile(r"valid/(.*?) ?lm loss")
"""With the name of the validation set, if it has one."""
THROUGHPUT = "speed/tokens per second"


@dataclass(frozen=True)
class PlotLossConfig:
    """Input and output."""

    tensorboard_dir: tuple[Path, ...]
    """Directories with TensorBoard event files, one per run."""
    labels: tuple[str, ...] = ()
    """Names of the runs in the legend, one per directory; the names of the directories by default."""
    output: Path = flag(Path("loss.png"), output="file")
    """Image file: .png, .pdf or .svg."""
    title: str = "Language model loss"
    """Title of the picture."""
    smoothing: float = flag(0.6, minimum=0, below=1)
    """Smoothing of the bold line: the weight of a point in the average decreases by this factor per step of distance.
    0 disables smoothing."""


COMMANDS = (Command((PlotLossConfig,)),)


class _ScalarCurve(NamedTuple):
    iterations: tuple[int, ...]
    values: tuple[float, ...]


class _RunCurves(NamedTuple):
    label: str
    train_loss: _ScalarCurve
    valid_losses: dict[str, _ScalarCurve]
    """By the name of the validation set; "" if it has none."""
    tokens_per_second: _ScalarCurve | None


def _read_run(directory: Path, label: str) -> _RunCurves:
    if not directory.is_dir():
        raise UserError(f"--tensorboard-dir {directory}: no such directory")
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={SCALARS: 0})
    events.Reload()
    # A run that has just been restarted has tags whose points were all repeated.
    tags: list[str] = [tag for tag in events.Tags()[SCALARS] if events.Scalars(tag)]
    if TRAIN_LOSS not in tags:
        found = f"scalars are {', '.join(tags)}" if tags else "there are no scalars"
        raise UserError(f"--tensorboard-dir {directory}: no '{TRAIN_LOSS}' in its event files, {found}")
    matches = [VALID_LOSS.fullmatch(tag) for tag in tags]
    sets = {match[1]: match[0] for match in matches if match}
    valid = {name: _read_curve(events, tag) for name, tag in sets.items()}
    throughput = _read_curve(events, THROUGHPUT) if THROUGHPUT in tags else None
    return _RunCurves(label, _read_curve(events, TRAIN_LOSS), valid, throughput)


def _read_curve(events: "EventAccumulator", tag: str) -> _ScalarCurve:
    """Read a scalar. A resumed run repeats iterations that were not saved; the values written last count."""
    written = sorted(events.Scalars(tag), key=lambda event: event.wall_time)
    by_iteration = dict(sorted({event.step: event.value for event in written}.items()))
    return _ScalarCurve(tuple(by_iteration), tuple(by_iteration.values()))


def _smooth(values: Sequence[float], weight: float) -> list[float]:
    """Return, at each value, the average of all values with weights `weight ** distance`.

    The average is two-sided because an average of past values lags behind a falling loss, and would be above the
    validation loss. Non-finite values do not enter averages and are returned unchanged.
    """

    def two_sided(amounts: Sequence[float]) -> list[float]:
        before = itertools.accumulate(amounts, lambda total, amount: weight * total + amount)
        after = list(itertools.accumulate(reversed(amounts), lambda total, amount: weight * total + amount))[::-1]
        return [past + future - amount for past, future, amount in zip(before, after, amounts, strict=True)]

    finite = [math.isfinite(value) for value in values]
    sums = two_sided([value if is_finite else 0.0 for value, is_finite in zip(values, finite, strict=True)])
    masses = two_sided([float(is_finite) for is_finite in finite])
    return [
        total / mass if is_finite else value
        for value, is_finite, total, mass in zip(values, finite, sums, masses, strict=True)
    ]


def _draw(runs: Sequence[_RunCurves], title: str, smoothing: float) -> "Figure":
    # matplotlib is optional; its absence is reported by parse_options.
    from matplotlib.figure import Figure

    with_throughput = any(run.tokens_per_second for run in runs)
    figure = Figure(figsize=(9, 7 if with_throughput else 5), layout="constrained")
    heights = [3, 1] if with_throughput else [1]
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for number, run in enumerate(runs):
        color, train = f"C{number}", run.train_loss
        if smoothing > 0:
            axes[0].plot(*train, color=color, alpha=0.25, linewidth=0.8)
        bold = _smooth(train.values, smoothing)
        axes[0].plot(train.iterations, bold, color=color, label=f"{run.label}: training")
        for (name, curve), marker in zip(run.valid_losses.items(), itertools.cycle("os^Dv")):
            dashed = {"linestyle": "--", "marker": marker, "markersize": 4}
            axes[0].plot(*curve, color=color, label=f"{run.label}: validation {name}".rstrip(), **dashed)
        if run.tokens_per_second:
            axes[1].plot(*run.tokens_per_second, color=color, linewidth=1)
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


def _find_errors(config: PlotLossConfig) -> Iterator[str]:
    if config.labels and len(config.labels) != len(config.tensorboard_dir):
        yield (
            f"--labels: found {len(config.labels)}, expected one for each of the "
            f"{len(config.tensorboard_dir)} directories of --tensorboard-dir"
        )
    yield from image_errors("--output", config.output)


parse_options = functools.partial(
    parse_config, PlotLossConfig, program="plot_loss.py", description=__doc__, find_errors=_find_errors
)


def main(argv: Sequence[str]) -> None:
    """Read the command line and draw the picture."""
    config = parse_options(argv)
    labels = config.labels or tuple(directory.resolve().name for directory in config.tensorboard_dir)
    runs: list[_RunCurves] = []
    errors = ErrorCollector()
    for directory, label in zip(config.tensorboard_dir, labels, strict=True):
        with errors.collect():
            runs.append(_read_run(directory, label))
    errors.raise_if_any()
    config.output.parent.mkdir(parents=True, exist_ok=True)
    _draw(runs, config.title, config.smoothing).savefig(config.output, dpi=120)
    for run in runs:
        last, value = run.train_loss.iterations[-1], run.train_loss.values[-1]
        print(f"{run.label}: training loss {value:.4f} at iteration {last}")
    print(f"plot: {config.output}")


entry_point = functools.partial(run_program, main)
