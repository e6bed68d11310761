"""The wirings that a study compares, and the training flags of each."""

from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES

STANDARD = "standard"
"""The wiring that all others are compared with."""
STALENESS_2, HYBRID, DESYNC = "staleness-2", "hybrid", "desync-2x"
DEFAULT_WIRINGS = (STANDARD, "parallel", "ladder", "ladder-parallel", STALENESS_2, HYBRID, DESYNC)
ALL_WIRINGS = (*SHARED_STREAM_MODES, STALENESS_2, HYBRID, DESYNC)
TIMED_WIRINGS = (*SHARED_STREAM_MODES, STALENESS_2)
"""Wirings whose steps tools/benchmark.py times, under the same names."""


def wiring_flags(name: str, num_layers: int) -> tuple[str, ...]:
    """Return the flags of pretrain_ladder.py for one of `ALL_WIRINGS`."""
    ladder = ("--residual-mode", "ladder")
    flags: dict[str, tuple[str, ...]] = {mode: ("--residual-mode", mode) for mode in SHARED_STREAM_MODES} | {
        STALENESS_2: (*ladder, "--residual-staleness", "2"),
        HYBRID: (*ladder, "--ladder-layers", str(num_layers // 2)),
        DESYNC: ("--residual-mode", "desync", "--desync-interval", "2"),
    }
    return flags[name]


def fewest_ranks(name: str) -> int:
    """Return the fewest tensor-parallel processes with which a wiring is defined."""
    return 2 if name == DESYNC else 1
