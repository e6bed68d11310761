"""All-reduces in boxes and across, by arithmetic."""

from dataclasses import replace

import pytest

from ladder_lab.cost.layout import Layout
from ladder_lab.cost.machines import PRESETS, Machine
from ladder_lab.cost.placement import Spread, placement

KILOBYTE, MEGABYTE, GIGABYTE = 2**10, 2**20, 10**9
H100 = Machine.usual("h100")


def spread(ranks: int, stride: int = 1, per_box: int = 8) -> frozenset[Spread]:
    """Return where `stride` groups of every `stride`-th rank are."""
    return placement(Layout(tensor=stride, data=ranks), per_box).data


def test_reduces_inside_a_box_and_across() -> None:
    assert H100.all_reduce_seconds(MEGABYTE, spread(1)) == 0.0
    assert H100.all_reduce_seconds(MEGABYTE, spread(8)) == PRESETS["nvlink"].seconds(MEGABYTE, 8)
    # One GPU of each of four boxes: nothing inside, 1.5 S over each adapter, two doublings of the boxes.
    assert H100.all_reduce_seconds(GIGABYTE, spread(4, 8)) == pytest.approx(40e-6 + 1.5 / 47)
    # Two of each of two boxes: their adapters carry half of it each, 1 S / 2, which is slower than 1 S by NVLink.
    assert H100.all_reduce_seconds(GIGABYTE, spread(4, 4)) == pytest.approx(20e-6 + 6.18e-6 + 0.5 / 47)
    # 18.44 us inside for 32 KB, and 4 KB over each adapter: the latency, and 20 us times the root of 4 KB in MB.
    both = 18.44e-6 + 20e-6 + 20e-6 / 16
    assert H100.all_reduce_seconds(32 * KILOBYTE, spread(16)) == pytest.approx(both)
    # Published: 44 us for 32 KB on two H100 nodes, with an older NCCL, and 50.6 us for 8 B on two p6-b200.
    assert both == pytest.approx(44e-6, rel=0.11)
    p6 = replace(Machine.usual("b200"), network=PRESETS["efa"])
    assert p6.all_reduce_seconds(8, spread(16)) == pytest.approx(50.6e-6, rel=0.01)


def test_a_box_shares_its_adapters() -> None:
    box = Machine.usual("rtx-4090")
    assert (box.per_box, box.adapters) == (4, 1)
    # Four quarters of the tensor through one adapter.
    assert box.all_reduce_seconds(GIGABYTE, spread(8, 1, 4)) == pytest.approx((5.77 * 4 - 3.5 + 46) * 1e-6 + 1 / 1.1)
    stages = placement(Layout(pipeline=2, data=4), 4).following
    assert box.all_reduce_seconds(GIGABYTE, stages) == pytest.approx(46e-6 + 4 / 1.1)
    alone = replace(box, adapters=4)
    expected = (5.77 * 4 - 3.5 + 46) * 1e-6 + 0.25 / 1.1
    assert alone.all_reduce_seconds(GIGABYTE, spread(8, 1, 4)) == pytest.approx(expected)


def test_gathers_go_around() -> None:
    assert H100.gather_seconds(GIGABYTE, spread(1)) == 0.0
    assert H100.gather_seconds(GIGABYTE, spread(8)) == H100.all_reduce_seconds(GIGABYTE, spread(8)) / 2
    assert H100.gather_seconds(GIGABYTE, spread(4, 8)) == pytest.approx(1.5 / 47 / 2 + 3 * 5e-6)


def test_figures_of_the_command_line_replace_those_of_a_link() -> None:
    link = PRESETS["pcie-4-host"].changed(21, 38)
    assert link.seconds(8, 16) == pytest.approx(21e-6, rel=0.02)
    assert link.seconds(GIGABYTE, 8) == pytest.approx(21e-6 + 1.75 / 38)
    network = PRESETS["ib-400"].changed(10, None, per_doubling=True)
    assert network.seconds(GIGABYTE, 4) == pytest.approx(20e-6 + 1.5 / 47)
    assert PRESETS["pcie-4"].changed(None, None) is PRESETS["pcie-4"]


def test_figures_of_the_command_line_shift_a_table() -> None:
    """The times of small and of huge tensors are the given ones, and the curve between them keeps its shape."""
    measured = PRESETS["nvlink"]
    given = measured.changed(2 * 15.59, 100)
    assert given.seconds(8, 8) == given.seconds(8, 16) == pytest.approx(2 * 15.59e-6)
    assert given.seconds(4 * GIGABYTE, 8) == pytest.approx(4 * 1.75 / 100)
    # Twice the latency and a rate 4.45 times lower: the knee is at a size 2.2 times smaller.
    bus = 1.75 * 2**29 / 2111.06e-6 / GIGABYTE
    size = 8 * MEGABYTE * 2 * 100 / bus
    assert given.seconds(size, 8) == pytest.approx(2 * 78.91e-6)
    assert measured.changed(None, 100).seconds(8, 8) == measured.seconds(8, 8)
    assert measured.changed(21, None).seconds(GIGABYTE, 8) == pytest.approx(measured.seconds(GIGABYTE, 8))
    assert measured.changed(0, None).seconds(8, 8) < 1e-8
    network = measured.changed(10, None, per_doubling=True)
    assert network.seconds(8, 4) == pytest.approx(20e-6)
