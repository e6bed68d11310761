"""Presets of interconnects by arithmetic, and close to the measurements that they cite."""

import pytest

from ladder_lab.cost.machines import PRESETS

MICROSECONDS = 1e-6
KILOBYTE, MEGABYTE, GIGABYTE = 2**10, 2**20, 10**9


@pytest.mark.parametrize(
    ("name", "num_bytes", "ranks", "microseconds"),
    [
        ("nvlink", 16 * KILOBYTE, 8, 4.1 + 2.12 * 8 + 14 / 8),
        ("nvlink", MEGABYTE, 2, 4.1 + 2.12 * 2 + 14),
        ("nvlink", GIGABYTE, 4, 4.1 + 2.12 * 4 + 1.5e6 / 282),
        ("no-p2p", 8 * KILOBYTE, 8, -4.1 + 6.05 * 8 + 1.16 * 7),
        ("no-p2p", 24 * KILOBYTE, 4, -4.1 + 6.05 * 4 + 1.16 * 3 * 2),
        ("no-p2p", GIGABYTE, 8, -4.1 + 6.05 * 8 + 1.75e6 / 233),
        ("no-p2p", 16 * KILOBYTE, 2, 8 + 89 / 8),
        ("no-p2p", GIGABYTE, 2, 8 + 1e6 / 15.5),
        ("nvlink-5", 64 * KILOBYTE, 8, 15.15),
        ("pcie-4-p2p", 32 * KILOBYTE, 4, 17.9),
        ("dgx-spark", 8 * KILOBYTE, 2, 29.4),
        ("ib-200", 8, 2, 20),
        ("infiniband", 32 * KILOBYTE, 16, 44),
        ("infiniband", 128 * KILOBYTE, 16, 44 + 22 / 3),
    ],
)
def test_presets_by_arithmetic(name: str, num_bytes: int, ranks: int, microseconds: float) -> None:
    assert PRESETS[name].seconds(num_bytes, ranks) == pytest.approx(microseconds * MICROSECONDS, rel=0.01)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_say_what_they_know(name: str) -> None:
    preset = PRESETS[name]
    assert preset.name == name
    assert preset.seconds(MEGABYTE, 1) == 0.0
    with pytest.raises(ValueError, match=f"{name}: measured for .* ranks, found 32"):
        preset.seconds(MEGABYTE, 32)
    for ranks in preset.measured_ranks:
        times = [preset.seconds(1 << power, ranks) for power in range(31)]
        assert times == sorted(times)
