"""Measures exposed communication, per step and per sub-block, in a trace of --profile."""

import functools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ladder_lab.bench import exposed  # noqa: E402
from ladder_lab.bench.exposed import COMMUNICATION_KERNELS, ELSEWHERE, Communication, TracedCollective  # noqa: E402
from megatron_ladder.cli.images import image_errors  # noqa: E402
from megatron_ladder.cli.programs import Command  # noqa: E402
from megatron_ladder.command_line import parse_config  # noqa: E402
from megatron_ladder.errors import UserError, run_program  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ExposedCommunicationConfig:
    """Input and output."""

    trace: Path
    """Trace of one rank, written by --profile."""
    json: Path | None = flag(None, output="file")
    """File for the results."""
    plot: Path | None = flag(None, output="file")
    """Image file (.png, .pdf or .svg) for a chart of the in-flight and exposed time of each sub-block."""
    communication_kernels: str = COMMUNICATION_KERNELS
    """Regular expression that matches the names of communication kernels on CUDA."""


COMMANDS = (Command((ExposedCommunicationConfig,)),)


_Row = dict[str, Any]
"""A step or sub-block: its columns, and the totals of its collectives."""


def _totals(collectives: Sequence[TracedCollective], steps: int) -> _Row:
    return {
        "collectives": len(collectives) / steps,
        "in_flight_seconds": sum(collective.in_flight_seconds for collective in collectives) / steps,
        "exposed_seconds": sum(collective.exposed_seconds for collective in collectives) / steps,
    }


def _step_rows(found: Communication) -> list[_Row]:
    rows = []
    for iteration, seconds in sorted(found.step_seconds.items()):
        own = [collective for collective in found.collectives if collective.iteration == iteration]
        rows.append({"iteration": iteration, "seconds": seconds, **_totals(own, 1), "collectives": len(own)})
    return rows


def _sub_block_rows(found: Communication) -> list[_Row]:
    """Return the rows of all sub-blocks, by layer, forward before backward; code outside sub-blocks comes last."""

    def order(owner: tuple[str, str]) -> tuple[bool, int, str, bool]:
        name, direction = owner
        number = re.search(r"\d+", name)
        # `attention` precedes `mlp` within a layer alphabetically.
        return name == ELSEWHERE, int(number[0]) if number else 0, name, direction == "backward"

    rows = []
    for owner in sorted({collective.owner for collective in found.collectives}, key=order):
        own = [collective for collective in found.collectives if collective.owner == owner]
        rows.append({**owner._asdict(), **_totals(own, len(found.step_seconds))})
    return rows


def _table(device: str, steps: Sequence[_Row], sub_blocks: Sequence[_Row]) -> str:
    counted = {
        "cpu": "CPU: exposed is the time inside waits; in flight is the time from launch to the end of the wait.",
        "cuda": "CUDA: exposed is the time of communication kernels while no other kernel runs; in flight is all.",
    }
    lines = [counted[device], "", "| step | ms | collectives | in flight ms | exposed ms | of the step |"]
    lines.append("|---" * 6 + "|")
    for row in steps:
        lines.append(
            f"| {row['iteration']} | {1e3 * row['seconds']:.3f} | {row['collectives']} "
            f"| {1e3 * row['in_flight_seconds']:.3f} | {1e3 * row['exposed_seconds']:.3f} "
            f"| {row['exposed_seconds'] / row['seconds']:.1%} |"
        )
    lines += ["", "| of a step | | collectives | in flight ms | exposed ms |", "|---" * 5 + "|"]
    for row in sub_blocks:
        lines.append(
            f"| {row['name']} | {row['direction']} | {row['collectives']:g} | {1e3 * row['in_flight_seconds']:.3f} "
            f"| {1e3 * row['exposed_seconds']:.3f} |"
        )
    return "\n".join(lines)


def _draw(rows: Sequence[_Row], title: str) -> "Figure":
    """Draw one bar per sub-block, forward above and backward below: in-flight time pale, exposed time bold."""
    # matplotlib is optional; its absence is reported by parse_options.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    names = list(dict.fromkeys(row["name"] for row in rows if row["name"] != ELSEWHERE))
    for panel, direction in zip(panels, ("forward", "backward"), strict=True):
        own = [row for row in rows if row["direction"] == direction]
        across = [names.index(row["name"]) for row in own]
        panel.bar(across, [1e3 * row["in_flight_seconds"] for row in own], color="0.8", label="in flight")
        panel.bar(across, [1e3 * row["exposed_seconds"] for row in own], color="C3", label="exposed")
        panel.set_ylabel(f"{direction} (ms)")
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_title(title)
    panels[0].legend()
    panels[1].set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    return figure


def _find_errors(config: ExposedCommunicationConfig) -> Iterator[str]:
    try:
        re.compile(config.communication_kernels)
    except re.error as error:
        yield f"--communication-kernels {config.communication_kernels}: not a regular expression: {error}"
    if config.plot is not None:
        yield from image_errors("--plot", config.plot)


parse_options = functools.partial(
    parse_config,
    ExposedCommunicationConfig,
    program="exposed_communication.py",
    description=__doc__,
    find_errors=_find_errors,
)


def main(argv: Sequence[str]) -> None:
    """Read the trace and write the requested results."""
    config = parse_options(argv)
    try:
        found = exposed.communication(exposed.read_events(config.trace), config.communication_kernels)
    except ValueError as error:
        raise UserError(f"--trace {config.trace}: {error}: give a file that --profile wrote") from None
    steps, sub_blocks = _step_rows(found), _sub_block_rows(found)
    print(_table(found.device, steps, sub_blocks))
    for output in (config.json, config.plot):
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
    if config.json is not None:
        result = {"device": found.device, "steps": steps, "sub_blocks": sub_blocks}
        config.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if config.plot is not None:
        _draw(sub_blocks, f"communication of a step, {config.trace.name}").savefig(config.plot, dpi=120)


if __name__ == "__main__":
    run_program(main)
