"""Checks of flags that name an image file to draw."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path


def image_errors(flag: str, path: Path | None) -> Iterator[str]:
    """Yield an error if the suffix is not supported, and one if matplotlib (the extra [plot]) is not installed."""
    if path is not None and path.suffix not in (".png", ".pdf", ".svg"):
        yield f"{flag} {path}: expected a name that ends in .png, .pdf or .svg"
    if importlib.util.find_spec("matplotlib") is None:
        yield "matplotlib is not installed: pip install matplotlib"
