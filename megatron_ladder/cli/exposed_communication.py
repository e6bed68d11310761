"""Measures exposed communication, per step and per sub-block, in a trace of --profile."""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ladder.cli.images import image_name_errors, matplotlib_errors
from megatron_ladder.cli.programs import Command
from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import parse_config
from megatron_ladder.lab.bench.exposed import (
    COMMUNICATION_KERNELS,
    ELSEWHERE,
    Communication,
    TracedCollective,
    communication,
    read_events,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ExposedCommunicationConfig:
    """Input and output."""

    trace: Path
    """Trace of one rank, written by --profile."""
    json: Path | None = None
    """File for the results."""
    plot: Path | None = None
    """Image file (.png, .pdf or .svg) for a chart of the in-flight and exposed time of each sub-block."""
    communication_kernels: str = COMMUNICATION_KERNELS
    """Regular expression that matches the names of communication kernels on CUDA."""


COMMANDS = (Command((ExposedCommunicationConfig,)),)


@dataclass(frozen=True)
class _StepRow:
    """Communication of one step."""

    iteration: int
    seconds: float
    collectives: int
    in_flight_seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class _SubBlockRow:
    """Communication that one sub-block, or the code outside sub-blocks, launched; the mean over all steps."""

    name: str
    direction: str
    """forward, backward, or "" outside sub-blocks."""
    collectives: float
    in_flight_seconds: float
    exposed_seconds: float


def _step_rows(found: Communication) -> list[_StepRow]:
    """Return the rows of all steps, in order."""
    rows = []
    for iteration, seconds in sorted(found.step_seconds.items()):
        own = [collective for collective in found.collectives if collective.iteration == iteration]
        rows.append(_StepRow(iteration, seconds, len(own), _in_flight(own), _exposed(own)))
    return rows


def _sub_block_rows(found: Communication) -> list[_SubBlockRow]:
    """Return the rows of all sub-blocks, by layer, forward before backward; code outside sub-blocks comes last."""
    steps = len(found.step_seconds)
    rows = []
    for owner in sorted({collective.owner for collective in found.collectives}, key=_row_order):
        own = [collective for collective in found.collectives if collective.owner == owner]
        rows.append(
            _SubBlockRow(owner.name, owner.direction, len(own) / steps, _in_flight(own) / steps, _exposed(own) / steps)
        )
    return rows


def _in_flight(collectives: Sequence[TracedCollective]) -> float:
    return sum(collective.in_flight_seconds for collective in collectives)


def _exposed(collectives: Sequence[TracedCollective]) -> float:
    return sum(collective.exposed_seconds for collective in collectives)


def _row_order(owner: tuple[str, str]) -> tuple[bool, int, str, bool]:
    """Sort key of a row. `attention` precedes `mlp` within a layer alphabetically."""
    name, direction = owner
    number = re.search(r"\d+", name)
    return name == ELSEWHERE, int(number[0]) if number else 0, name, direction == "backward"


def _table(found: Communication, steps: Sequence[_StepRow], sub_blocks: Sequence[_SubBlockRow]) -> str:
    """Format both tables, after a line that defines their columns."""
    counted = {
        "cpu": "CPU: exposed is the time inside waits; in flight is the time from launch to the end of the wait.",
        "cuda": "CUDA: exposed is the time of communication kernels while no other kernel runs; in flight is all.",
    }
    lines = [
        counted[found.device],
        "",
        "| step | ms | collectives | in flight ms | exposed ms | of the step |",
        "|---|---|---|---|---|---|",
    ]
    for step in steps:
        lines.append(
            f"| {step.iteration} | {1e3 * step.seconds:.3f} | {step.collectives} | {1e3 * step.in_flight_seconds:.3f} "
            f"| {1e3 * step.exposed_seconds:.3f} | {step.exposed_seconds / step.seconds:.1%} |"
        )
    lines += ["", "| of a step | | collectives | in flight ms | exposed ms |", "|---|---|---|---|---|"]
    for row in sub_blocks:
        lines.append(
            f"| {row.name} | {row.direction} | {row.collectives:g} | {1e3 * row.in_flight_seconds:.3f} "
            f"| {1e3 * row.exposed_seconds:.3f} |"
        )
    return "\n".join(lines)


def _draw(found: Communication, rows: Sequence[_SubBlockRow], title: str) -> "Figure":
    """Draw one bar per sub-block, forward above and backward below: in-flight time pale, exposed time bold."""
    # matplotlib is optional; its absence is reported by parse_options.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    names = list(dict.fromkeys(row.name for row in rows if row.name != ELSEWHERE))
    places = {name: place for place, name in enumerate(names)}
    for panel, direction in zip(panels, ("forward", "backward"), strict=True):
        own = [row for row in rows if row.direction == direction]
        across = [places[row.name] for row in own]
        panel.bar(across, [1e3 * row.in_flight_seconds for row in own], color="0.8", label="in flight")
        panel.bar(across, [1e3 * row.exposed_seconds for row in own], color="C3", label="exposed")
        panel.set_ylabel(f"{direction} (ms)")
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_title(title)
    panels[0].legend()
    panels[1].set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    return figure


def parse_options(argv: Sequence[str]) -> ExposedCommunicationConfig:
    """Read the command line."""
    return parse_config(ExposedCommunicationConfig, argv, "exposed_communication.py", __doc__, _find_errors)


def _find_errors(config: ExposedCommunicationConfig) -> Iterator[str]:
    try:
        re.compile(config.communication_kernels)
    except re.error as error:
        yield f"--communication-kernels {config.communication_kernels}: not a regular expression: {error}"
    yield from image_name_errors("--plot", config.plot)
    if config.plot is not None:
        yield from matplotlib_errors()


def main(argv: Sequence[str]) -> None:
    """Read the trace and write the requested results."""
    config = parse_options(argv)
    try:
        found = communication(read_events(config.trace), config.communication_kernels)
    except ValueError as error:
        raise UserError(f"--trace {config.trace}: {error}: give a file that --profile wrote") from None
    steps, sub_blocks = _step_rows(found), _sub_block_rows(found)
    print(_table(found, steps, sub_blocks))
    if config.json is not None:
        result: dict[str, Any] = {
            "device": found.device,
            "steps": [asdict(row) for row in steps],
            "sub_blocks": [asdict(row) for row in sub_blocks],
        }
        config.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if config.plot is not None:
        _draw(found, sub_blocks, f"communication of a step, {config.trace.name}").savefig(config.plot, dpi=120)


entry_point = functools.partial(run_program, main)
