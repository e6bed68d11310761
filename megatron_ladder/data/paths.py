"""Which data sets a command line names, in words or in files of words."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ladder.config.data import DataConfig
from megatron_ladder.errors import UserError

PARTS = ("train", "valid", "test")


class DataWords(NamedTuple):
    """What follows each of the four flags: prefixes, each with a weight before it or none."""

    data_path: Sequence[str]
    train: Sequence[str]
    valid: Sequence[str]
    test: Sequence[str]


def find_data(data: DataConfig) -> DataWords:
    """Reads the files that stand for flags; the flags themselves are as they were given.

    Raises:
        UserError: a file that cannot be read or holds something else, or a flag beside the file that stands for it.
    """
    mistakes: list[str] = []
    words = list(map(str, data.data_path))
    if data.data_args_path is not None:
        if words:
            mistakes.append("--data-args-path and --data-path exclude each other: give one of them")
        text = _read(data.data_args_path, "--data-args-path", mistakes)
        words = [] if text is None else text.split()
        if text is not None and not words:
            mistakes.append(f"--data-args-path {data.data_args_path}: names no data set")
    own = {part: list(map(str, getattr(data, f"{part}_data_path"))) for part in PARTS}
    if data.per_split_data_args_path is not None:
        if any(own.values()):
            given = " ".join(f"--{part}-data-path" for part in PARTS if own[part])
            mistakes.append(f"--per-split-data-args-path and {given} exclude each other: give one of them")
        own = _read_parts(data.per_split_data_args_path, mistakes)
    if mistakes:
        raise UserError(*mistakes)
    return DataWords(words, *(own[part] for part in PARTS))


def _read(path: Path, flag: str, mistakes: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        mistakes.append(f"{flag} {path}: cannot be read: {error}")
        return None


def _read_parts(path: Path, mistakes: list[str]) -> dict[str, list[str]]:
    flag = "--per-split-data-args-path"
    text = _read(path, flag, mistakes)
    own: dict[str, list[str]] = {part: [] for part in PARTS}
    try:
        values: Any = {} if text is None else json.loads(text)
    except ValueError as error:
        mistakes.append(f"{flag} {path}: not JSON: {error}")
        return own
    unknown = [key for key in values if key not in PARTS] if isinstance(values, dict) else [values]
    if unknown:
        mistakes.append(f"{flag} {path}: expected an object with keys {', '.join(PARTS)}, found {unknown[0]!r}")
        return own
    for part, value in values.items():
        words = value.split() if isinstance(value, str) else [] if value is None else value
        if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
            mistakes.append(f"{flag} {path}: {part}: expected a text, or a list of weights and prefixes")
        else:
            own[part] = [str(word) for word in words]
    return own
