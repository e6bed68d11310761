"""Checks of flags that name an image file to draw."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

_SUFFIXES = (".png", ".pdf", ".svg")


def image_name_errors(flag: str, path: Path | None) -> Iterator[str]:
    """Yield an error if an image has a suffix that is not supported."""
    if path is not None and path.suffix not in _SUFFIXES:
        yield f"{flag} {path}: expected a name that ends in .png, .pdf or .svg"


def matplotlib_errors() -> Iterator[str]:
    """Yield an error if matplotlib, which comes with the extra [plot], is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        yield "matplotlib is not installed: pip install matplotlib"
