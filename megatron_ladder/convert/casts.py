"""Numbers of one floating-point type as those of another, on the bytes; rounded to nearest, ties to even."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

RAW: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""Element size in bytes -> the integers that stand for such elements here."""

_NATIVE: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}


def cast(raw: NDArray[np.unsignedinteger], source: str, target: str) -> NDArray[np.unsignedinteger]:
    """The same numbers in another type.

    Args:
        raw: elements of type `source` as unsigned integers of their size; any shape.
        source, target: `float32`, `bfloat16` or `float16`.

    Raises:
        OverflowError: a finite number has no finite one near it in the new type.
    """
    if source == target:
        return raw
    wide = (raw.astype(np.uint32) << 16).view(np.float32) if source == "bfloat16" else raw.view(_NATIVE[source])
    if target != "bfloat16":
        with np.errstate(over="ignore"):
            narrow = wide.astype(_NATIVE[target])
        _check_range(wide, np.isinf(narrow))
        return narrow.view(RAW[narrow.itemsize])
    return _float32_to_bfloat16(wide.astype(np.float32, copy=False))


def _float32_to_bfloat16(wide: NDArray[np.floating]) -> NDArray[np.unsignedinteger]:
    bits = wide.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    rounded[np.isnan(wide)] = 0x7FC0
    _check_range(wide, (rounded & 0x7FFF) == 0x7F80)
    return rounded


def _check_range(wide: NDArray[np.floating], infinite: NDArray[np.bool_]) -> None:
    if infinite.any() and np.isfinite(wide[infinite]).any():
        raise OverflowError(f"a number as large as {np.abs(wide[np.isfinite(wide)]).max():.3g}")
