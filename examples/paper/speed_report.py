"""Writes the report of speed.sh: our speeds of inference next to the paper's and the step-time model's.

    python examples/paper/speed_report.py FOLDER

reads FOLDER/SIZE-p2p-on.json and SIZE-p2p-off.json and writes FOLDER/report.md. It does not import torch.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(REPOSITORY), str(REPOSITORY / "tools")]

from ladder_lab.bench.paper import GENERATE, PROMPT, Peers, PublishedSpeed, published_speed  # noqa: E402
from ladder_lab.bench.results import RequestRow  # noqa: E402
from ladder_lab.markdown import markdown_table  # noqa: E402
from megatron_ladder.errors import UserError, run_program  # noqa: E402
from megatron_ladder.files import write_atomically  # noqa: E402

SIZES = (
    "paper-1.2b",
    "paper-3.5b-tp8",
    "llama-8b",
    "llama-34b",
    "llama-70b",
    "bloom-176b",
    "llama-405b",
    "paper-1.5b",
    "paper-4.5b-tp8",
)
PEERS: tuple[Peers, ...] = ("on", "off")
NOT_PUBLISHED: tuple[tuple[str, Peers], ...] = (("paper-1.5b", "off"), ("paper-4.5b-tp8", "off"))
TOY = "**Toy shapes** on two CPU cores over an emulated interconnect: the paper's figures only show where they belong."


def read_rows(folder: Path) -> dict[tuple[str, Peers], list[RequestRow]]:
    """Return the rows of every file that exists, by size and P2P; raise UserError for a file of another program."""
    found = {}
    for size in SIZES:
        for peers in PEERS:
            path = folder / f"{size}-p2p-{peers}.json"
            if not path.exists():
                continue
            try:
                values: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
                found[size, peers] = [RequestRow(**value) for value in values]
            except (OSError, ValueError, TypeError) as error:
                raise UserError(f"{path}: not written by tools/benchmark.py serve: {error}: remove it") from None
    return found


def published(size: str, peers: Peers, row: RequestRow) -> PublishedSpeed:
    """Return the paper's figures for a row, also if a toy shape stands in for the size."""
    return published_speed(size, row.wiring, peers, 16 if size == "llama-405b" else 8, row.batch, PROMPT, GENERATE)


def is_in_range(row: RequestRow) -> bool:
    """Return whether the measured speed-up, give or take half of its spread, is in the model's range."""
    low, high = row.predicted_range
    return low - row.spread / 2 <= row.speed_up <= high + row.spread / 2


def paper_table(rows: dict[tuple[str, Peers], list[RequestRow]]) -> str:
    """Return one row for each figure of the paper that was measured."""
    lines = []
    for (size, peers), own in rows.items():
        for row in own:
            theirs = published(size, peers, row)
            if theirs == PublishedSpeed():
                continue
            lines.append(
                {
                    "size": size,
                    "P2P": peers,
                    "batch": str(row.batch),
                    "wiring": row.wiring,
                    "tokens/s": f"{row.tokens_per_second:,.1f}",
                    "paper's tokens/s": _number(theirs.tokens_per_second, ",.1f"),
                    "speed-up": f"{row.speed_up:.3f}",
                    "paper's speed-up": _number(theirs.speed_up, ".3g"),
                    "model": "{:.2f} to {:.2f}".format(*row.predicted_range),
                }
            )
    return markdown_table(lines)


def wirings_table(rows: dict[tuple[str, Peers], list[RequestRow]]) -> str:
    """Return the speed-up of every wiring in every setting; those outside of the model's range are bold."""
    lines = []
    for (size, peers), own in rows.items():
        for batch in dict.fromkeys(row.batch for row in own):
            line = {"size": size, "P2P": peers, "batch": str(batch)}
            for row in own:
                if row.batch == batch and row.wiring != "standard":
                    text = f"{row.speed_up:.2f}"
                    line[row.wiring] = text if is_in_range(row) else f"**{text}**"
            lines.append(line)
    return markdown_table(lines)


def report(folder: Path) -> str:
    """Return the report's text."""
    rows = read_rows(folder)
    if not rows:
        raise UserError(f"{folder}: no results: run examples/paper/speed.sh {folder}")
    compared = [row for own in rows.values() for row in own if row.wiring != "standard"]
    inside = sum(map(is_in_range, compared))
    settings = [(size, peers) for size in SIZES for peers in PEERS if (size, peers) not in NOT_PUBLISHED]
    missing = [f"{size}, P2P {peers}" for size, peers in settings if (size, peers) not in rows]
    first = compared[0]
    parts = [
        "# Speed of inference",
        f"{first.prompt} prompt tokens, {first.generate} new tokens, {first.interconnect}. Speed-ups are over the "
        "standard wiring in the same rounds. The paper is arXiv 2501.06589.",
        *([TOY] if (first.prompt, first.generate) != (PROMPT, GENERATE) else []),
        "## Figures of the paper",
        paper_table(rows),
        "## All wirings",
        f"{inside} of {len(compared)} speed-ups are in the range of the step-time model; the others are bold.",
        wirings_table(rows),
        *(f"![{size}, P2P {peers}]({size}-p2p-{peers}.png)" for size, peers in rows),
    ]
    if missing:
        parts += ["## Not measured", "\n".join(f"* {name}" for name in missing)]
    return "\n\n".join(parts) + "\n"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def main(argv: Sequence[str]) -> None:
    """Write the report."""
    if len(argv) != 1:
        raise UserError("usage: speed_report.py FOLDER")
    folder = Path(argv[0])
    path = folder / "report.md"
    write_atomically(path, report(folder))
    print(f"report: {path}")


def entry_point() -> NoReturn:
    """Console entry point."""
    run_program(main)


if __name__ == "__main__":
    entry_point()
