"""Figures from measurements of synthetic machines whose figures are known, and the file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ladder_lab.cost.hardware import CLUSTERS
from ladder_lab.plan.calibration import (
    ClusterCalibration,
    DecodeTime,
    ProductTime,
    ReduceTime,
    _fit_line,
    apply_calibration,
    read_calibration,
    write_calibration,
)
from megatron_ladder.errors import UserError

LATENCY, PER_BYTE, RATE, FLOOR = 2e-5, 1e-9, 1e12, 5e-5


def decode(size: str, weight_bytes: int, layers: int) -> DecodeTime:
    stream = 8192
    reduces = 2 * layers * (LATENCY + PER_BYTE * stream)
    return DecodeTime(size, weight_bytes, layers, stream, weight_bytes / RATE + layers * FLOOR + reduces)


MACHINE = ClusterCalibration(
    device="a GPU",
    ranks=4,
    reduces=tuple(ReduceTime(size, LATENCY + PER_BYTE * size) for size in (4096, 1 << 16, 1 << 20, 1 << 24)),
    decodes=(decode("one", 10**9, 16), decode("two", 8 * 10**9, 32)),
    product=ProductTime(3e12, 0.010, 1 << 24, 0.016, 0.019),
)


def test_figures_are_recovered() -> None:
    assert MACHINE.link == pytest.approx((LATENCY, PER_BYTE))
    assert MACHINE.decoding == pytest.approx((RATE, FLOOR))
    assert MACHINE.flops_per_second == pytest.approx(3e14)
    assert MACHINE.contention == pytest.approx(0.3)
    for together, share in ((0.015, 0.0), (0.030, 1.0)):
        product = replace(MACHINE.product, together_seconds=together)
        assert replace(MACHINE, product=product).contention == share


def test_a_line_stays_above_zero() -> None:
    assert _fit_line([(1, 3), (2, 5)]) == pytest.approx((1, 2))
    assert _fit_line([(1, 4), (2, 4)]) == pytest.approx((4, 0))
    a, b = _fit_line([(1, 5), (2, 4)])
    assert (b, 4 < a < 5) == (0.0, True)
    a, b = _fit_line([(1, 1), (2, 3)])
    assert (a, 1 < b < 1.5) == (0.0, True)


def test_measurements_replace_figures() -> None:
    cluster = apply_calibration(CLUSTERS["h100"], MACHINE, "mine.json")
    assert cluster.calibrated
    assert cluster.all_reduce_seconds(1 << 20, 4) == pytest.approx(LATENCY + PER_BYTE * (1 << 20))
    assert cluster.flops_share * cluster.peak_flops == pytest.approx(3e14)
    assert cluster.memory_bytes_per_second == pytest.approx(RATE)
    assert cluster.contention_of(1 << 24) == pytest.approx(0.3)
    assert cluster.network_bytes_per_second == CLUSTERS["h100"].network_bytes_per_second
    assert cluster.sources["flops_share"] == "mine.json: 4 x a GPU"
    assert "mine.json" not in cluster.sources["network_seconds"]


def test_too_similar_sizes_are_rejected() -> None:
    alike = replace(MACHINE, decodes=(decode("one", 10**9, 16), decode("two", 2 * 10**9, 32)))
    with pytest.raises(UserError, match="--calibration mine.json: .* measure again"):
        apply_calibration(CLUSTERS["h100"], alike, "mine.json")


def test_the_file_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_calibration(MACHINE, path)
    assert read_calibration(path) == MACHINE
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.json"]
    with pytest.raises(UserError, match="cannot be written"):
        write_calibration(MACHINE, path / "in a file.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "another"}, 'expected "format"'),
        ({"reduces": 3}, "measurements cannot be read"),
        ({"ranks": 1}, "2 or more ranks"),
        ({"decodes": []}, "2 decodes"),
        ({"product": {"flops": 1}}, "measurements cannot be read"),
    ],
)
def test_other_files_are_rejected(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "mine.json"
    write_calibration(MACHINE, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        read_calibration(path)
    path.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        read_calibration(path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_calibration(tmp_path / "missing")
