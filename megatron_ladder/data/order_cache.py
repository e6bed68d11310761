"""A cache of sample orders on disk, so that the processes of a machine build an order once and share one copy.

`order_<key>.bin` holds an XXH3-128 of the rest, the number of arrays, the length of each, and the arrays, all as
little-endian int64. The key is a hash of everything that determines the order (content of the data, split, seed,
sequence length, epoch), so a file is never out of date. A damaged file is rebuilt. Runs can share a directory, and it
can be deleted.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_ladder.files import atomic_writer, lock_file, remove_temporary_files

_DIGEST_BYTES = 16
_Arrays = tuple[NDArray[np.int64], ...]


def load_or_build(
    folder: Path, description: Mapping[str, Any], build: Callable[[], Sequence[NDArray[np.int64]]]
) -> _Arrays:
    """Return the arrays of `description` (JSON-able), mapped from a file in `folder`, which is built if it is missing.

    One process builds and the others wait. The lock is the kernel's, so it ends with the process that holds it. A
    directory that cannot be locked or written costs time and memory, but is not an error.
    """
    key = xxhash.xxh3_128_hexdigest(json.dumps(description, sort_keys=True).encode())
    path = folder / f"order_{key}.bin"
    found = _read_order(path)
    if found is not None:
        return found
    with _locked(path.with_suffix(".lock")) as is_locked:
        found = _read_order(path)
        if found is not None:
            return found
        arrays = tuple(build())
        try:
            if is_locked:
                remove_temporary_files(path)
            lengths = np.array([len(arrays), *map(len, arrays)], "<i8")
            content = np.concatenate([lengths, *arrays]).astype("<i8", copy=False)
            with atomic_writer(path) as file:
                file.write(xxhash.xxh3_128_digest(content.data))
                file.write(content.data)
        except OSError as error:
            warnings.warn(f"--data-cache-path {folder}: the order of samples is not cached: {error}", stacklevel=2)
            return arrays
    return _read_order(path) or arrays


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock during the block; yields False if the file system has no locks."""
    try:
        file = open(path, "ab")  # noqa: SIM115 - an error of the block must not be caught
    except OSError:
        yield False
        return
    with file:
        error = lock_file(file.fileno(), wait=True)
        if error is not None:
            warnings.warn(f"{path}: cannot be locked ({error}): every process builds its own order", stacklevel=4)
        yield error is None


def _read_order(path: Path) -> _Arrays | None:
    """Return the arrays of a file, mapped and read-only; None if there is no complete file."""
    try:
        # Given a Path, NumPy would look at each of its directories.
        content = np.memmap(str(path), np.uint8, mode="r").data
    except (OSError, ValueError):
        return None
    if content[:_DIGEST_BYTES] != xxhash.xxh3_128_digest(content[_DIGEST_BYTES:]):
        return None
    values = np.frombuffer(content, "<i8", offset=_DIGEST_BYTES)
    count = int(values[0])
    return tuple(np.split(values[1 + count :], np.cumsum(values[1:count])))
