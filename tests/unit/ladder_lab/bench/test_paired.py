"""Order, pairing and verdicts of timed rounds, on fake clocks."""

from collections.abc import Callable

import pytest

from ladder_lab.bench.paired import PairedTimes, Ratio, RatioVerdict, measure


def test_ways_alternate_and_only_their_time_counts() -> None:
    now, events = [0.0], list[str]()

    def way(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            events.append(name)
            now[0] += seconds * (1 + events.count(name))

        return run

    def barrier(name: str) -> None:
        events.append(f"|{name.upper()}")
        now[0] += 100.0

    ways = {"a": way("a", 1.0), "b": way("b", 10.0)}
    times = measure(ways, 4, warm_up_rounds=2, before_each=barrier, label="ways", clock=lambda: now[0])
    assert "".join(events) == "|Aa|Bb" * 6
    assert times.seconds == {"a": (4, 5, 6, 7), "b": (40, 50, 60, 70)}


def test_ratios_are_paired() -> None:
    """When a machine slows down in each round, the ratio of medians is wrong and the median of ratios is right."""
    drift = (1.0, 2.0, 3.0, 50.0, 60.0)
    steady = {"slow": tuple(1.5 * d for d in drift), "fast": drift}
    assert PairedTimes(steady).ratio("slow", "fast") == Ratio(1.5, 1.5, 1.5)
    shifted = {"slow": (10.0, 20.0, 30.0, 40.0, 50.0), "fast": (10.0, 10.0, 10.0, 10.0, 10.0)}
    assert PairedTimes(shifted).ratio("slow", "fast") == Ratio(3.0, 2.0, 4.0)
    assert PairedTimes(shifted).median("slow") == 30.0


@pytest.mark.parametrize(
    ("ratio", "bound", "verdict"),
    [
        (Ratio(1.5, 1.45, 1.55), 1.45, RatioVerdict.SOUND),
        (Ratio(1.5, 1.45, 1.55), 1.35, RatioVerdict.ABOVE_BOUND),
        (Ratio(1.5, 1.35, 1.55), 2.0, RatioVerdict.TOO_NOISY),
    ],
)
def test_verdicts(ratio: Ratio, bound: float | None, verdict: RatioVerdict) -> None:
    assert ratio.verdict(bound) is verdict
