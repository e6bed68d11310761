"""The wirings that a study compares, and how each is asked for."""

from megatron_ladder.lab.study.trial import Wiring

STANDARD = "standard"
"""What all others are compared with."""
DESYNC_RANKS = 2
"""Of which each has a residual stream of its own."""
ALL_WIRINGS = ("standard", "parallel", "ladder", "ladder-parallel", "staleness-2", "hybrid", "desync-2x")
TIMED_WIRINGS = ("standard", "parallel", "ladder", "ladder-parallel", "staleness-2")
"""Those whose steps tools/benchmark.py times."""


def find_wiring(name: str, num_layers: int) -> Wiring:
    """The wiring of a name, for a model of so many layers.

    Raises:
        KeyError: there is none of that name.
    """
    late = ("--residual-mode", "ladder")
    flags: dict[str, tuple[str, ...]] = {
        "standard": ("--residual-mode", "standard"),
        "parallel": ("--residual-mode", "parallel"),
        "ladder": late,
        "ladder-parallel": ("--residual-mode", "ladder-parallel"),
        "staleness-2": (*late, "--residual-staleness", "2"),
        "hybrid": (*late, "--ladder-layers", str(num_layers // 2)),
        "desync-2x": ("--residual-mode", "desync", "--desync-interval", "2"),
    }
    timed_as = name if name in TIMED_WIRINGS else None
    return Wiring(name, flags[name], timed_as, DESYNC_RANKS if name == "desync-2x" else 1)
