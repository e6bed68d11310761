"""Writes the report of speed.sh: our speeds of inference next to the paper's and the step-time model's.

    python examples/paper/speed_report.py FOLDER

reads FOLDER/SIZE-p2p-P2P-batch-BATCH-prefill.json and -decode.json, or FOLDER/one-gpu-batch-BATCH-*.json, and writes
FOLDER/report.md. A request is one prefill and GENERATE - 1 decode steps. It does not import torch.

The figures of one GPU depend on the time of an all-reduce, which was fixed before any measurement, so that it cannot be
chosen to suit: that of NCCL, as others measured it between 8 H100 with NVLink. With it, standard must be as fast as the
authors' standard, or a little faster, as kernels are today. Only then does the report show the paper's speed-ups.
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

from ladder_lab.bench.results import BenchmarkRow, results_table  # noqa: E402
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
Rows = Mapping[str, BenchmarkRow]
"""Rows by wiring."""
Published = Mapping[tuple[str, str, str, str], dict[str, float]]
FILE = re.compile(r"(.+)-p2p-(on|off)-batch-(\d+)-decode\.json")
ONE_GPU_FILE = re.compile(r"one-gpu-batch-(\d+)-decode\.json")
FIXED_SIZE, FIXED_ALPHA, ONE_SHOT_ALPHA = "llama-70b", "nvlink", "nvlink-one-shot"
ACCEPTED = (0.0, 0.12)
"""Least and largest share by which standard on one GPU may exceed the paper's tokens/s, at each of its batch sizes."""


def read_published() -> Published:
    """Return the paper's figures by size, P2P, batch and wiring."""
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        return {
            (row["size"], row["p2p"], row["batch"], row["wiring"]): {
                name: float(row[name]) for name in ("tokens_per_second", "speed_up") if row[name]
            }
            for row in csv.DictReader(file)
        }


def _read(path: Path) -> list[BenchmarkRow]:
    try:
        return [BenchmarkRow(**value) for value in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not written by tools/benchmark.py: {error}: remove it") from None


def _by_wiring(rows: Sequence[BenchmarkRow], size: str = "", alpha: str = "") -> Rows:
    return {row.wiring: row for row in rows if size in ("", row.size) and alpha in ("", row.alpha)}


def read_rows(folder: Path) -> dict[Setting, tuple[Rows, Rows]]:
    """Return prefill and decode by setting and wiring; raise UserError for a file of another program."""
    found = {}
    for path in sorted(folder.glob("*-decode.json")):
        if match := FILE.fullmatch(path.name):
            size, peers, batch = match.groups()
            prefill = _read(Path(str(path).replace("-decode", "-prefill")))
            found[size, peers, batch] = _by_wiring(prefill), _by_wiring(_read(path))
    return found


def read_one_gpu(folder: Path, alpha: str) -> dict[Setting, tuple[Rows, Rows]]:
    """Return what `read_rows` does, measured on one GPU at one time of an all-reduce, where both parts exist.

    Long messages are NCCL's in any case, so there is one prefill for all.
    """
    measured = {}
    paths = {match[1]: path for path in folder.glob("*.json") if (match := ONE_GPU_FILE.fullmatch(path.name))}
    for batch, path in sorted(paths.items(), key=lambda item: int(item[0])):
        prefill_path = path.with_name(path.name.replace("decode", "prefill"))
        if not prefill_path.exists():
            continue
        prefill = _read(prefill_path)
        decode = _read(path)
        for size in dict.fromkeys(row.size for row in decode):
            measured[size, "on", batch] = _by_wiring(prefill, size, FIXED_ALPHA), _by_wiring(decode, size, alpha)
    return measured


def request_seconds(prefill: float, step: float) -> float:
    """Return the seconds of a request; prefill gives its first token."""
    return prefill + (GENERATE - 1) * step


def tokens_per_second(batch: str, prefill: BenchmarkRow, decode: BenchmarkRow) -> float:
    """Return the new tokens of a batch of requests per second."""
    return int(batch) * GENERATE / request_seconds(prefill.median_seconds, decode.median_seconds)


def requests_table(measured: Mapping[Setting, tuple[Rows, Rows]], published: Published) -> str:
    """Return one row for each wiring in each setting, next to what was published."""
    lines = []
    for (size, peers, batch), (prefill, decode) in measured.items():
        standard = request_seconds(prefill["standard"].median_seconds, decode["standard"].median_seconds)
        for wiring in decode:
            theirs = published.get((size, peers, batch, wiring), {})
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
                    "tokens/s": f"{tokens_per_second(batch, first, step):,.1f}",
                    "paper's": _number(theirs.get("tokens_per_second"), ",.1f"),
                    "speed-up": f"{standard / seconds:.3f}",
                    "paper's speed-up": _number(theirs.get("speed_up"), ".3g"),
                    "model": f"{standard / predicted:.2f}",
                    "": "; ".join(sorted(doubts)),
                }
            )
    return markdown_table(lines)


def acceptance(measured: Mapping[Setting, tuple[Rows, Rows]], published: Published) -> tuple[bool, str]:
    """Return whether the time of an all-reduce explains the paper's standard, and a table of why."""
    lines = []
    for (size, peers, batch, wiring), theirs in published.items():
        if (size, peers, wiring) != (FIXED_SIZE, "on", "standard"):
            continue
        prefill, decode = measured.get((size, peers, batch), ({}, {}))
        ours = excess = None
        verdict = "not measured"
        if "standard" in prefill and "standard" in decode:
            ours = tokens_per_second(batch, prefill["standard"], decode["standard"])
            excess = ours / theirs["tokens_per_second"] - 1
            verdict = "accepted" if ACCEPTED[0] <= excess <= ACCEPTED[1] else "not accepted"
        lines.append(
            {
                "batch": batch,
                "standard, tokens/s": _number(ours, ",.1f"),
                "paper's": f"{theirs['tokens_per_second']:,.1f}",
                "above the paper's": _number(excess, "+.1%"),
                "": verdict,
            }
        )
    return all(line[""] == "accepted" for line in lines), markdown_table(lines)


def one_gpu_report(folder: Path, published: Published) -> list[str]:
    """Return the sections about one GPU that played one of eight; none without measurements."""
    measured = read_one_gpu(folder, FIXED_ALPHA)
    if not measured:
        return []
    is_accepted, table = acceptance(measured, published)
    verdict = (
        f"**{'Accepted' if is_accepted else 'Not accepted'}.** Standard must be {ACCEPTED[0]:.0%} to "
        f"{ACCEPTED[1]:.0%} faster than the paper's {FIXED_SIZE} at every batch size."
    )
    if not is_accepted:
        verdict += (
            " Otherwise, the time of an all-reduce does not explain the paper's standard, and a comparison of "
            "speed-ups would show nothing, so the paper's are left out."
        )
    controls = [row for path in sorted(folder.glob("one-gpu-*-controls.json")) for row in _read(path)]
    decode_rows = [row for path in sorted(folder.glob("one-gpu-*-decode.json")) for row in _read(path)]
    controls += [row for row in decode_rows if row.alpha == "0"]
    return [
        "# One GPU as one of eight",
        "An all-reduce is a kernel that takes multiprocessors for as long as others measured, and nobody is late.",
        "## Acceptance",
        table,
        verdict,
        "## All-reduces of NCCL",
        requests_table(measured, published if is_accepted else {}),
        "## All-reduces in one shot while decoding",
        requests_table(read_one_gpu(folder, ONE_SHOT_ALPHA), {}),
        "## Decode steps without all-reduces, and with other multiprocessors and late ranks",
        results_table([row for row in controls if row.wiring in ("standard", "ladder")]),
    ]


def report(folder: Path) -> str:
    """Return the report's text."""
    published, measured = read_published(), read_rows(folder)
    parts = one_gpu_report(folder, published)
    if not (measured or parts):
        raise UserError(f"{folder}: no results: run examples/paper/speed.sh {folder}")
    if measured:
        rows = {(*setting, wiring) for setting, (_, decode) in measured.items() for wiring in decode}
        missing = [
            f"* {size}, P2P {p2p}, batch {batch}, {wiring}" for size, p2p, batch, wiring in published.keys() - rows
        ]
        parts += [
            "# Speed of inference",
            f"{GENERATE} new tokens, from the times of a prefill and of a decode step. Speed-ups are over standard, "
            "and the paper is arXiv 2501.06589. With --tiny, shapes are toys on two CPU cores over an emulated "
            "interconnect, and the paper's figures only show where they belong.",
            requests_table(measured, published),
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
