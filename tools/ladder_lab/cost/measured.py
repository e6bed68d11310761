"""Measured times of all-reduces, by machine, library, number of GPUs and size.

A row of `all_reduce_times.csv` has the microseconds for the bytes of each column. They are from NVIDIA's AIConfigurator
(github.com/ai-dynamo/aiconfigurator, Apache-2.0): NCCL as timed by nccl-tests, and what SGLang and vLLM run in a CUDA
graph. The latter are their own kernels for small tensors over NVLink or of two GPUs, and NCCL otherwise.

Between two columns, the logarithm of the time is linear in that of the size. A size predicted from the others is 2 %
off (median; nine of ten are within 13 %), more where a library changes its protocol, as `test_measured.py` lists.
"""

import csv
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

Curve = Sequence[tuple[int, float]]
"""(bytes, microseconds), by size."""
TABLE = Path(__file__).with_name("all_reduce_times.csv")


@cache
def read_table() -> Mapping[tuple[str, str, int], tuple[str, Curve]]:
    """Return the version of the library and its times, by machine, library and number of GPUs."""
    table = {}
    with open(TABLE, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            curve = [(int(name), float(cell)) for name, cell in row.items() if name.isdecimal() and cell]
            table[row["machine"], row["library"], int(row["gpus"])] = row["version"], curve
    return table


def measured_curves(machine: str, libraries: Sequence[str]) -> dict[int, Curve]:
    """Return the times of the fastest of these libraries at each size, by number of GPUs.

    A number that was not measured is between its neighbours: the time is linear in the number of GPUs, as hops are.
    """
    measured = {}
    for ranks in {ranks for name, _, ranks in read_table() if name == machine}:
        curves = [dict(read_table()[machine, library, ranks][1]) for library in libraries]
        measured[ranks] = {size: min(curve[size] for curve in curves) for size in curves[0]}
    by_ranks: dict[int, Curve] = {}
    for below, above in pairwise(sorted(measured)):
        for ranks in range(below, above + 1):
            share = (ranks - below) / (above - below)
            times = zip(measured[below].items(), measured[above].values(), strict=True)
            by_ranks[ranks] = [(size, time + share * (more - time)) for (size, time), more in times]
    return by_ranks


def interpolate(curve: Curve, num_bytes: float) -> float:
    """Return the time of a size: below the first one its time, above the last one with its bandwidth."""
    if num_bytes <= curve[0][0]:
        return curve[0][1]
    if num_bytes >= curve[-1][0]:
        return curve[-1][1] * num_bytes / curve[-1][0]
    index = bisect_left(curve, (num_bytes, 0.0))
    (size, time), (next_size, next_time) = curve[index - 1 : index + 1]
    share = math.log(num_bytes / size) / math.log(next_size / size)
    return time ** (1 - share) * next_time**share


def curve_parts(
    curve: Curve, num_bytes: float, latency: float | None, per_byte: float | None
) -> tuple[float, float, float]:
    """Return the microseconds of latency, of steps and on the wire; the steps include the wire.

    Latency and time per byte of another machine, in us, shift the curve along both logarithmic axes; None are its own.
    """
    first = curve[0][1]
    largest, last = curve[-1]
    if latency is None:
        latency = first
    # A latency of 0 has no logarithm.
    latency = latency or 1e-3
    per_byte = last / largest if per_byte is None else per_byte
    scale = latency / first
    total = scale * interpolate(curve, num_bytes * per_byte * largest / (last * scale))
    latency = min(latency, total)
    return latency, total - latency, min(per_byte * num_bytes, total - latency)
