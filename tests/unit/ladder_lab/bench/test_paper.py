"""The paper's speeds appear in the settings in which they were measured, and nowhere else."""

import pytest

from ladder_lab.bench.paper import Peers, PublishedSpeed, published_speed

NOTHING = PublishedSpeed()


@pytest.mark.parametrize(
    ("size", "wiring", "peers", "batch", "expected"),
    [
        ("llama-70b", "standard", "on", 1, PublishedSpeed(77.39)),
        ("llama-70b", "standard", "off", 64, PublishedSpeed(1454.42)),
        ("llama-70b", "ladder", "off", 16, PublishedSpeed(speed_up=1.351)),
        ("llama-8b", "ladder", "on", 4, PublishedSpeed(speed_up=1.46)),
        ("paper-1.2b", "standard", "on", 4, PublishedSpeed(1008.29)),
        ("paper-1.2b", "standard", "off", 4, NOTHING),
        ("llama-8b", "ladder", "on", 1, NOTHING),
        ("llama-70b", "parallel", "on", 1, NOTHING),
        ("llama-70b", "ladder", None, 1, NOTHING),
        ("small", "ladder", "on", 4, NOTHING),
    ],
)
def test_published_settings(size: str, wiring: str, peers: Peers | None, batch: int, expected: PublishedSpeed) -> None:
    assert published_speed(size, wiring, peers, 8, batch, 1024, 512) == expected
    assert published_speed(size, wiring, peers, 4, batch, 1024, 512) == NOTHING
    assert published_speed(size, wiring, peers, 8, batch, 1024, 256) == NOTHING
    assert published_speed("llama-405b", "ladder", "on", 16, 4, 1024, 512) == PublishedSpeed(speed_up=1.31)
