"""Links of a cluster by arithmetic, and that no figure is without a source."""

from dataclasses import fields

import pytest

from ladder_lab.cost.hardware import CLUSTERS, HOP, Cluster

MB = 2**20


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_every_figure_has_a_source(name: str) -> None:
    cluster = CLUSTERS[name]
    figures = {field.name for field in fields(Cluster)} - {"name", "sources"}
    assert set(cluster.sources) == figures and cluster.name == name
    assert f"{cluster.memory_bytes / 1e9:.0f} GB" in cluster.sources["memory_bytes"]


def test_reduces_inside_a_node_and_across() -> None:
    cluster = CLUSTERS["h100"]
    assert cluster.all_reduce_seconds(MB, 1) == 0.0
    root, wire = 14e-6, 1.75 * MB / 282e9
    assert cluster.all_reduce_seconds(MB, 8) == pytest.approx(4.1e-6 + 8 * 2.12e-6 + (root**2 + wire**2) ** 0.5)
    # One GPU of each of four nodes: nothing inside, 1.5 S over each adapter, two doublings of the nodes.
    assert cluster.all_reduce_seconds(MB, 4, stride=8) == pytest.approx(40e-6 + 1.5 * MB / 50e9)
    # Two of each of two nodes: their adapters carry half of it each, 1 S/2, which is slower than 1 S by NVLink.
    expected = 20e-6 + 4.1e-6 + 2 * 2.12e-6 + (14e-6**2 + (MB / 2 / 50e9) ** 2) ** 0.5
    assert cluster.all_reduce_seconds(MB, 4, stride=4) == pytest.approx(expected)
    assert cluster.all_reduce_seconds(32 * 1024, 16) == pytest.approx(44e-6, rel=0.1)


def test_gathers_go_around() -> None:
    cluster = CLUSTERS["h100"]
    assert cluster.gather_seconds(MB, 1) == 0.0
    assert cluster.gather_seconds(MB, 8) == pytest.approx(cluster.all_reduce_seconds(MB, 8) / 2)
    assert cluster.gather_seconds(MB, 4, stride=8) == pytest.approx(1.5 * MB / 50e9 / 2 + 3 * HOP * 20e-6)
