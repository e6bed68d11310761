"""The wirings that a study compares and times."""

from megatron_ladder.blueprint.wiring import SHARED_STREAM_MODES

STANDARD = "standard"
"""The wiring that all others are compared with."""
DEFAULT_WIRINGS = (STANDARD, "parallel", "ladder", "ladder-parallel", "staleness-2", "desync-2x", "own-partials-1")
TIMED_WIRINGS = (*SHARED_STREAM_MODES, "staleness-2")
"""Wirings that a study times with tools/benchmark.py, which has the same names."""
