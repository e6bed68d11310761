"""The data sets that a command line names, directly or in files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ladder.config.data import DataConfig
from megatron_ladder.errors import ErrorCollector

PARTS = ("train", "valid", "test")


class DataArguments(NamedTuple):
    """Arguments of the four flags that name data: `P1 P2 ...` or `W1 P1 W2 P2 ...`, or nothing.

    A path P is given without .bin and .idx; W is its weight.
    """

    data_path: Sequence[str]
    train: Sequence[str]
    valid: Sequence[str]
    test: Sequence[str]


def find_data(data: DataConfig) -> DataArguments:
    """Return the arguments of the four flags, from the command line or from the files that replace them.

    Raises:
        UserError: a file cannot be read or is malformed, or both a flag and the file that replaces it are given.
    """
    errors = ErrorCollector()
    words = list(map(str, data.data_path))
    if data.data_args_path is not None:
        if words:
            errors.add("--data-args-path and --data-path exclude each other: give one of them")
        text = _read(data.data_args_path, "--data-args-path", errors)
        words = [] if text is None else text.split()
        if text is not None and not words:
            errors.add(f"--data-args-path {data.data_args_path}: names no data set")
    own = {part: list(map(str, getattr(data, f"{part}_data_path"))) for part in PARTS}
    if data.per_split_data_args_path is not None:
        if any(own.values()):
            given = " ".join(f"--{part}-data-path" for part in PARTS if own[part])
            errors.add(f"--per-split-data-args-path and {given} exclude each other: give one of them")
        own = _read_parts(data.per_split_data_args_path, errors)
    errors.raise_if_any()
    return DataArguments(words, *(own[part] for part in PARTS))


def _read(path: Path, flag: str, errors: ErrorCollector) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        errors.add(f"{flag} {path}: cannot be read: {error}")
        return None


def _read_parts(path: Path, errors: ErrorCollector) -> dict[str, list[str]]:
    flag = "--per-split-data-args-path"
    text = _read(path, flag, errors)
    own: dict[str, list[str]] = {part: [] for part in PARTS}
    try:
        values: Any = {} if text is None else json.loads(text)
    except ValueError as error:
        errors.add(f"{flag} {path}: not JSON: {error}")
        return own
    unknown = [key for key in values if key not in PARTS] if isinstance(values, dict) else [values]
    if unknown:
        errors.add(f"{flag} {path}: expected an object with keys {', '.join(PARTS)}, found {unknown[0]!r}")
        return own
    for part, value in values.items():
        words = value.split() if isinstance(value, str) else [] if value is None else value
        if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
            errors.add(f"{flag} {path}: {part}: expected a text, or a list of weights and prefixes")
        else:
            own[part] = [str(word) for word in words]
    return own
