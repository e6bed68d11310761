"""The table of measured all-reduces: read as it is, predicted from itself, and compared with reports of others."""

import csv
import math
import statistics
from collections.abc import Iterator
from itertools import pairwise

import pytest

from ladder_lab.cost.machines import PRESETS
from ladder_lab.cost.measured import TABLE, Curve, interpolate, read_table

KILOBYTE, MEGABYTE = 2**10, 2**20
MACHINES = {
    "nvlink": "h100_sxm",
    "nvlink-h200": "h200_sxm",
    "nvlink-3": "a100_sxm",
    "nvlink-5": "b200_sxm",
    "pcie-4": "l40s",
    "pcie-5-p2p": "rtx_pro_6000_server",
}
STEPS = {
    # (machine, library, GPUs): KB at which a doubling of the size takes a third more time than the doublings before and
    # after it, or, negative, a quarter less, from 16 KB on. NCCL changes protocol or algorithm; servers go from one of
    # their kernels to another, or to NCCL.
    ("a100_sxm", "nccl", 2): [512],
    ("a100_sxm", "sglang", 2): [8192],
    ("a100_sxm", "sglang", 4): [8192],
    ("a100_sxm", "sglang", 8): [8192],
    ("a100_sxm", "vllm", 2): [4096],
    ("a100_sxm", "vllm", 4): [4096],
    ("a100_sxm", "vllm", 8): [4096],
    ("b200_sxm", "nccl", 2): [2048],
    ("b200_sxm", "nccl", 4): [4096],
    ("b200_sxm", "sglang", 2): [16384],
    ("b200_sxm", "sglang", 4): [16384],
    ("b200_sxm", "sglang", 8): [16384],
    ("b200_sxm", "vllm", 2): [1024],
    ("b200_sxm", "vllm", 4): [256],
    ("b200_sxm", "vllm", 8): [128, -512],
    ("h100_sxm", "nccl", 2): [1024],
    ("h200_sxm", "nccl", 2): [1024],
    ("h200_sxm", "sglang", 8): [256, -512],
    ("l40s", "nccl", 8): [1024, -32768, 65536],
    ("l40s", "sglang", 8): [-512, 1024],
    ("l40s", "vllm", 8): [-512, 1024],
    ("rtx_pro_6000_server", "nccl", 4): [-512],
    ("rtx_pro_6000_server", "nccl", 8): [-512],
    ("rtx_pro_6000_server", "sglang", 4): [-512],
    ("rtx_pro_6000_server", "sglang", 8): [-512],
    ("rtx_pro_6000_server", "vllm", 4): [128],
    ("rtx_pro_6000_server", "vllm", 8): [-512],
}


def cells() -> Iterator[tuple[str, str, int, int, float]]:
    """Yield machine, library, GPUs, bytes and seconds of every measurement."""
    with open(TABLE, encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    for machine, library, _, gpus, *times in rows:
        for size, time in zip(header[4:], times, strict=True):
            if time:
                yield machine, library, int(gpus), int(size), 1e-6 * float(time)


@pytest.mark.parametrize("link", MACHINES)
def test_presets_are_the_table(link: str) -> None:
    found = 0
    fastest: dict[tuple[int, int], float] = {}
    for machine, library, gpus, size, seconds in cells():
        if machine != MACHINES[link]:
            continue
        if library == "nccl":
            assert PRESETS[link].seconds(size, gpus) == pytest.approx(seconds)
            found += 1
        else:
            fastest[gpus, size] = min(seconds, fastest.get((gpus, size), math.inf))
    for (gpus, size), seconds in fastest.items():
        assert PRESETS[f"{link}-one-shot"].seconds(size, gpus) == pytest.approx(seconds)
    assert (found, len(fastest)) == (3 * 21, 3 * 23)


def test_each_size_is_predicted_from_the_others() -> None:
    errors = []
    for _, curve in read_table().values():
        for index, (size, time) in enumerate(curve):
            others = [*curve[:index], *curve[index + 1 :]]
            errors.append(abs(interpolate(others, size) / time - 1))
    assert len(errors) == len(list(cells())) == 3 * 6 * (21 + 2 * 23)
    assert statistics.median(errors) < 0.03
    assert statistics.quantiles(errors, n=10)[-1] < 0.16


def steps(curve: Curve) -> list[int]:
    """Return the KB before a doubling of the size that takes longer, or negative, shorter, than its neighbours."""
    growths = [after / before for (_, before), (_, after) in pairwise(curve)]
    found = []
    for (size, _), before, growth, after in zip(curve[1:], growths, growths[1:], growths[2:], strict=False):
        if size < 16 * KILOBYTE:
            continue
        if growth > 4 / 3 * max(before, after):
            found.append(size // KILOBYTE)
        elif growth < 3 / 4 * min(before, after):
            found.append(-size // KILOBYTE)
    return found


def test_steps_of_the_protocols() -> None:
    table = {series: steps(curve) for series, (_, curve) in read_table().items()}
    assert {series: found for series, found in table.items() if found} == STEPS


def test_numbers_of_gpus_between_the_measured_ones() -> None:
    for name in MACHINES:
        link = PRESETS[name]
        for size in (8 * KILOBYTE, MEGABYTE):
            two, four, eight = (link.seconds(size, ranks) for ranks in (2, 4, 8))
            assert link.seconds(size, 3) == pytest.approx((two + four) / 2)
            assert link.seconds(size, 7) == pytest.approx((four + 3 * eight) / 4)
        latencies = [link.seconds(KILOBYTE, ranks) for ranks in range(2, 9)]
        assert latencies == sorted(latencies)
        with pytest.raises(ValueError, match=f"{name}: known for 2 to 8 ranks, found 9"):
            link.seconds(MEGABYTE, 9)
    # NVSwitch adds up for eight.
    assert PRESETS["nvlink"].seconds(64 * MEGABYTE, 8) < PRESETS["nvlink"].seconds(64 * MEGABYTE, 4)


@pytest.mark.parametrize(
    ("link", "ranks", "size", "microseconds"),
    [
        # NCCL in a CUDA graph on 8 H100: sgl-project/sglang#22734.
        ("nvlink", 8, 16 * KILOBYTE, 17.8),
        ("nvlink", 8, 64 * KILOBYTE, 19.9),
        ("nvlink", 8, 512 * KILOBYTE, 20.9),
        ("nvlink", 8, MEGABYTE, 27.0),
        # RTX PRO 6000: local-inference-lab/rtx6kpro, optimization/nccl-tuning.md.
        ("pcie-5-p2p", 4, KILOBYTE, 13.5),
        ("pcie-5-p2p", 4, MEGABYTE, 85.0),
        ("pcie-5-p2p", 8, 8 * KILOBYTE, 24.2),
    ],
)
def test_others_measured_the_same(link: str, ranks: int, size: int, microseconds: float) -> None:
    assert PRESETS[link].seconds(size, ranks) == pytest.approx(1e-6 * microseconds, rel=0.11)


def test_between_and_beyond_the_sizes() -> None:
    curve = [(2, 3.0), (8, 12.0)]
    assert interpolate(curve, 4) == pytest.approx(6.0)
    assert [interpolate(curve, size) for size in (0, 1, 2, 8, 80)] == pytest.approx([3.0, 3.0, 3.0, 12.0, 120.0])


@pytest.mark.parametrize("link", MACHINES)
def test_parts_are_the_whole(link: str) -> None:
    """A small tensor is latency and a huge one is on the wire, so that boxes in between can share both."""
    for name in (link, f"{link}-one-shot"):
        for ranks in (2, 5, 8):
            assert PRESETS[name].parts(64, ranks) == (PRESETS[name].seconds(1, ranks), 0.0, 0.0)
            latency, rest, wire = PRESETS[name].parts(2**34, ranks)
            assert latency < 1e-3 * rest and rest == wire
            for size in (KILOBYTE, MEGABYTE, 64 * MEGABYTE):
                latency, rest, wire = PRESETS[name].parts(size, ranks)
                assert min(latency, rest, wire) >= 0.0 and wire <= rest
