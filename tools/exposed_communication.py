"""Measures exposed communication, per step, sub-block and kind of collective, in a trace of --profile."""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ladder_lab.output import write_json  # noqa: E402
from megatron_ladder.command_line import parse_config  # noqa: E402
from megatron_ladder.errors import UserError, run_program  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402

if TYPE_CHECKING:
    import pandas as pd

    from ladder_lab.bench.exposed import Communication


@dataclass(frozen=True)
class ExposedCommunicationConfig:
    """Input and output."""

    trace: Path
    """Trace of one rank, written by --profile."""
    json: Path | None = flag(None, output="file")
    """File for the results."""


COUNTED = {
    "cpu": "CPU: exposed is the time inside waits; in flight is the time from launch to the end of the wait.",
    "cuda": "CUDA: exposed is the time of communication kernels while no other kernel runs; in flight is all.",
}


def _totals(communication: "Communication", *keys: str) -> "pd.DataFrame":
    """Return number and times of the collectives of each combination of keys."""
    times = {name: (name, "sum") for name in ("in_flight_seconds", "exposed_seconds")}
    return communication.collectives.groupby([*keys]).agg(collectives=("iteration", "size"), **times)


def _step_rows(communication: "Communication") -> "pd.DataFrame":
    """Return the totals of every step, by iteration."""
    table = _totals(communication, "iteration").reindex(sorted(communication.step_seconds), fill_value=0)
    table.insert(0, "seconds", [communication.step_seconds[iteration] for iteration in table.index])
    return table.rename_axis("iteration").reset_index()


def _sub_block_rows(communication: "Communication") -> "pd.DataFrame":
    """Return the means of all sub-blocks, by layer, forward before backward; code outside sub-blocks comes last."""
    table = (_totals(communication, "name", "direction") / len(communication.step_seconds)).reset_index()
    # `attention` precedes `mlp` within a layer alphabetically.
    number = table.name.str.extract(r"(\d+)", expand=False).astype(float)
    order = table.assign(number=number, backward=table.direction == "backward")
    return table.loc[order.sort_values(["number", "name", "backward"], na_position="last").index]


def _collective_rows(communication: "Communication") -> "pd.DataFrame":
    """Return the mean of each kind of collective in a step, by direction."""
    return (_totals(communication, "collective", "direction") / len(communication.step_seconds)).reset_index()


def _table(communication: "Communication") -> str:
    steps = _step_rows(communication)
    steps["exposed_share"] = steps.exposed_seconds / steps.seconds
    tables = (
        table.to_string(index=False, float_format="{:.6f}".format)
        for table in (steps, _sub_block_rows(communication), _collective_rows(communication))
    )
    return "\n\n".join([COUNTED[communication.device], *tables])


parse_options = functools.partial(
    parse_config, ExposedCommunicationConfig, program="exposed_communication.py", description=__doc__
)


def main(argv: Sequence[str]) -> None:
    """Read the trace and write the requested results."""
    config = parse_options(argv)
    from ladder_lab.bench import exposed

    try:
        communication = exposed.communication(exposed.read_events(config.trace))
    except ValueError as error:
        raise UserError(f"--trace {config.trace}: {error}: give a file that --profile wrote") from None
    print(_table(communication))
    rows = {
        "steps": _step_rows(communication),
        "sub_blocks": _sub_block_rows(communication),
        "collectives": _collective_rows(communication),
    }
    write_json(
        config.json, {"device": communication.device} | {name: table.to_dict("records") for name, table in rows.items()}
    )


if __name__ == "__main__":
    run_program(main)
