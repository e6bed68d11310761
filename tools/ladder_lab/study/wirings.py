"""The wirings that a study compares."""

STANDARD = "standard"
"""The wiring that all others are compared with."""
DEFAULT_WIRINGS = (STANDARD, "parallel", "ladder", "ladder-parallel", "staleness-2", "desync-2x", "own-partials-1")
