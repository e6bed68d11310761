"""Writes the report of speed.sh: our speeds of inference next to the paper's and the step-time model's.

    python examples/paper/speed_report.py FOLDER

reads FOLDER/SIZE-p2p-P2P-batch-BATCH-prefill.json and -decode.json and writes FOLDER/report.md. A request is one
prefill and GENERATE - 1 decode steps. It does not import torch.
"""

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(REPOSITORY), str(REPOSITORY / "tools")]

from ladder_lab.bench.results import BenchmarkRow  # noqa: E402
from ladder_lab.output import markdown_table  # noqa: E402
from megatron_ladder.errors import UserError, run_program  # noqa: E402
from megatron_ladder.files import write_atomically  # noqa: E402

GENERATE = 512
"""New tokens of a request of the paper; its prompts have 1,024."""
PUBLISHED = Path(__file__).with_name("published_speeds.csv")
"""The paper's tokens per second, and speed-ups over standard (abstract, tables and ICML 2025 poster). The authors' logs
name the shape of their 1B: that of paper-1.2b. The setting of the models of equal speed is not stated: their log of
paper-1.2b has 973.81 tokens/s at batch 4 with P2P."""
Setting = tuple[str, str, str]
"""Size, P2P and batch."""
FILE = re.compile(r"(.+)-p2p-(on|off)-batch-(\d+)-decode\.json")


def read_published() -> dict[tuple[str, str, str, str], dict[str, float]]:
    """Return the paper's figures by size, P2P, batch and wiring."""
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        return {
            (row["size"], row["p2p"], row["batch"], row["wiring"]): {
                name: float(row[name]) for name in ("tokens_per_second", "speed_up") if row[name]
            }
            for row in csv.DictReader(file)
        }


def _read(path: Path) -> dict[str, BenchmarkRow]:
    try:
        return {value["wiring"]: BenchmarkRow(**value) for value in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not written by tools/benchmark.py: {error}: remove it") from None


def read_rows(folder: Path) -> dict[Setting, tuple[Mapping[str, BenchmarkRow], Mapping[str, BenchmarkRow]]]:
    """Return prefill and decode by setting and wiring; raise UserError for a file of another program."""
    found = {}
    for path in sorted(folder.glob("*-decode.json")):
        if match := FILE.fullmatch(path.name):
            size, peers, batch = match.groups()
            found[size, peers, batch] = _read(Path(str(path).replace("-decode", "-prefill"))), _read(path)
    return found


def request_seconds(prefill: float, step: float) -> float:
    """Return the seconds of a request; prefill gives its first token."""
    return prefill + (GENERATE - 1) * step


def requests_table(folder: Path) -> tuple[str, set[tuple[str, str, str, str]]]:
    """Return one row for each wiring in each setting, and which published figures have one."""
    published, lines, measured = read_published(), [], set()
    for (size, peers, batch), (prefill, decode) in read_rows(folder).items():
        standard = request_seconds(prefill["standard"].median_seconds, decode["standard"].median_seconds)
        for wiring in decode:
            theirs = published.get((size, peers, batch, wiring), {})
            measured |= {(size, peers, batch, wiring)} & published.keys()
            first, step = prefill[wiring], decode[wiring]
            seconds = request_seconds(first.median_seconds, step.median_seconds)
            predicted = request_seconds(
                prefill["standard"].median_seconds / first.predicted_ratio,
                decode["standard"].median_seconds / step.predicted_ratio,
            )
            doubts = {first.verdict, step.verdict} - {"sound"}
            lines.append(
                {
                    "size": size,
                    "P2P": peers,
                    "batch": batch,
                    "wiring": wiring,
                    "tokens/s": f"{int(batch) * GENERATE / seconds:,.1f}",
                    "paper's": _number(theirs.get("tokens_per_second"), ",.1f"),
                    "speed-up": f"{standard / seconds:.3f}",
                    "paper's speed-up": _number(theirs.get("speed_up"), ".3g"),
                    "model": f"{standard / predicted:.2f}",
                    "": "; ".join(sorted(doubts)),
                }
            )
    return markdown_table(lines), measured


def report(folder: Path) -> str:
    """Return the report's text."""
    table, measured = requests_table(folder)
    if not table:
        raise UserError(f"{folder}: no results: run examples/paper/speed.sh {folder}")
    missing = [
        f"* {size}, P2P {p2p}, batch {batch}, {wiring}"
        for size, p2p, batch, wiring in read_published().keys() - measured
    ]
    parts = [
        "# Speed of inference",
        f"{GENERATE} new tokens, from the times of a prefill and of a decode step. Speed-ups are over standard, and "
        "the paper is arXiv 2501.06589. With --tiny, shapes are toys on two CPU cores over an emulated interconnect, "
        "and the paper's figures only show where they belong.",
        table,
    ]
    if missing:
        parts += ["## Figures of the paper without a measurement", "\n".join(sorted(missing))]
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
