"""The wirings that a study compares, and the training flags of each."""

from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES
from megatron_ladder.lab.study.trial import StudiedWiring

STANDARD = "standard"
"""The wiring that all others are compared with."""
STALENESS_2, HYBRID, DESYNC = "staleness-2", "hybrid", "desync-2x"
DEFAULT_WIRINGS = (STANDARD, "parallel", "ladder", "ladder-parallel", STALENESS_2, HYBRID, DESYNC)
ALL_WIRINGS = (*SHARED_STREAM_MODES, STALENESS_2, HYBRID, DESYNC)
TIMED_WIRINGS = (*SHARED_STREAM_MODES, STALENESS_2)
"""Wirings whose steps tools/benchmark.py times."""


def find_wiring(name: str, num_layers: int) -> StudiedWiring:
    """Return the wiring with a name, for a model of `num_layers` layers.

    Raises:
        KeyError: there is no wiring of that name.
    """
    ladder = ("--residual-mode", "ladder")
    flags: dict[str, tuple[str, ...]] = {mode: ("--residual-mode", mode) for mode in SHARED_STREAM_MODES} | {
        STALENESS_2: (*ladder, "--residual-staleness", "2"),
        HYBRID: (*ladder, "--ladder-layers", str(num_layers // 2)),
        DESYNC: ("--residual-mode", "desync", "--desync-interval", "2"),
    }
    timed_as = name if name in TIMED_WIRINGS else None
    return StudiedWiring(name, flags[name], timed_as, ranks=2 if name == DESYNC else 1)
