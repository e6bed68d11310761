"""From a trace of training to its exposed communication: per step and per sub-block, as tables, JSON and a picture."""

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_ladder.errors import UserError, run_program
from megatron_ladder.flags import parse_command_line
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
    """A trace that --profile has written; of one rank."""
    json: Path | None = None
    """File for the results."""
    plot: Path | None = None
    """Picture of the time in flight and the exposed time of every sub-block; the ending chooses the kind (.png, .pdf,
    .svg)."""
    communication_kernels: str = COMMUNICATION_KERNELS
    """On CUDA, a regular expression for the names of the kernels that communicate."""


@dataclass(frozen=True)
class StepRow:
    """One step."""

    iteration: int
    seconds: float
    collectives: int
    in_flight_seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class SubBlockRow:
    """What one sub-block, or what lies outside of them, started in forward or in backward, in the mean of the steps."""

    name: str
    direction: str
    """forward, backward, or "" outside of sub-blocks."""
    collectives: float
    in_flight_seconds: float
    exposed_seconds: float


def step_rows(found: Communication) -> list[StepRow]:
    """In the order of the steps."""
    rows = []
    for iteration, seconds in sorted(found.step_seconds.items()):
        own = [collective for collective in found.collectives if collective.iteration == iteration]
        rows.append(StepRow(iteration, seconds, len(own), _in_flight(own), _exposed(own)))
    return rows


def sub_block_rows(found: Communication) -> list[SubBlockRow]:
    """In the order of the layers, forward before backward, and at the end what lies outside."""
    steps = len(found.step_seconds)
    rows = []
    for owner in sorted({collective.owner for collective in found.collectives}, key=_place):
        own = [collective for collective in found.collectives if collective.owner == owner]
        rows.append(
            SubBlockRow(owner.name, owner.direction, len(own) / steps, _in_flight(own) / steps, _exposed(own) / steps)
        )
    return rows


def _in_flight(collectives: Sequence[TracedCollective]) -> float:
    return sum(collective.in_flight_seconds for collective in collectives)


def _exposed(collectives: Sequence[TracedCollective]) -> float:
    return sum(collective.exposed_seconds for collective in collectives)


def _place(owner: tuple[str, str]) -> tuple[bool, int, str, bool]:
    """`attention` comes before `mlp` in a layer, as its letters do."""
    name, direction = owner
    number = re.search(r"\d+", name)
    return name == ELSEWHERE, int(number[0]) if number else 0, name, direction == "backward"


def table(found: Communication, steps: Sequence[StepRow], sub_blocks: Sequence[SubBlockRow]) -> str:
    """Both tables, and above them what is counted."""
    counted = {
        "cpu": "CPU: exposed is the time inside waits; in flight is from the start to the end of the wait.",
        "cuda": "CUDA: exposed is the time of communication kernels beside which no other one runs; in flight is all.",
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


def draw(found: Communication, rows: Sequence[SubBlockRow], title: str) -> "Figure":
    """A bar for every sub-block, forward above and backward below: in flight pale, the exposed part bold."""
    # Not above: matplotlib comes with the extra [plot], and its absence deserves a sentence.
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
    """Reads the command line.

    Raises:
        UserError: a line for each mistake.
    """
    config: ExposedCommunicationConfig
    (config,) = parse_command_line(
        [ExposedCommunicationConfig], argv, program="exposed_communication.py",
        description="Communication that nothing hides, from a trace of --profile.",
    )  # fmt: skip
    mistakes = []
    try:
        re.compile(config.communication_kernels)
    except re.error as error:
        mistakes.append(f"--communication-kernels {config.communication_kernels}: no regular expression: {error}")
    if config.plot is not None and config.plot.suffix not in (".png", ".pdf", ".svg"):
        mistakes.append(f"--plot {config.plot}: expected a name that ends in .png, .pdf or .svg")
    if config.plot is not None and importlib.util.find_spec("matplotlib") is None:
        mistakes.append("--plot: matplotlib is not installed: pip install matplotlib")
    if mistakes:
        raise UserError(*mistakes)
    return config


def main(argv: Sequence[str]) -> None:
    """Reads the trace and writes what was asked for."""
    config = parse_options(argv)
    try:
        found = communication(read_events(config.trace), config.communication_kernels)
    except ValueError as error:
        raise UserError(f"--trace {config.trace}: {error}: give a file that --profile has written") from None
    steps, sub_blocks = step_rows(found), sub_block_rows(found)
    print(table(found, steps, sub_blocks))
    if config.json is not None:
        result: dict[str, Any] = {
            "device": found.device,
            "steps": [asdict(row) for row in steps],
            "sub_blocks": [asdict(row) for row in sub_blocks],
        }
        config.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if config.plot is not None:
        draw(found, sub_blocks, f"communication of a step, {config.trace.name}").savefig(config.plot, dpi=120)


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)
