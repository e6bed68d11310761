"""A cache of sample orders on disk, so that the processes of a machine build an order once and share one copy.

A file `order_<key>.bin` contains arrays of int64 after a header, all little-endian:

    bytes        content
    8            magic `MLORDER` and a digit, the version of this format
    16           XXH3-128 of the description that determines the order, which is also the file's name
    16           XXH3-128 of everything after the header
    8            u64, number of arrays A
    8 * A        u64, length of each

The description contains everything that determines an order (content of the data, split, seed, sequence length, epoch),
so a file is never out of date. A damaged file is rebuilt. Runs can share a directory, and it can be deleted.
"""

import json
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_ladder.files import atomic_writer, lock_file, remove_temporary_files

_MAGIC = b"MLORDER1"
_HEADER = struct.Struct("<8s16s16sQ")

_Arrays = tuple[NDArray[np.int64], ...]


def load_or_build(
    folder: Path, description: Mapping[str, Any], build: Callable[[], Sequence[NDArray[np.int64]]]
) -> _Arrays:
    """Return the arrays of `description`, mapped from a file in `folder`; the file is built if it is missing.

    One process builds and the others wait. The lock is the kernel's, so it ends with the process that holds it. A
    directory that cannot be locked or written costs time and memory, but is not an error.

    Args:
        description: JSON-able; the order of its keys does not matter.
    """
    key = xxhash.xxh3_128_digest(json.dumps(description, sort_keys=True).encode())
    path = folder / f"order_{key.hex()}.bin"
    found = _read_order(path, key)
    if found is not None:
        return found
    with _locked(path.with_suffix(".lock")) as locked:
        found = _read_order(path, key)
        if found is not None:
            return found
        arrays = tuple(build())
        # Without a lock, another process may have been faster, and others may map its file already.
        if not locked and (found := _read_order(path, key)) is not None:
            return found
        try:
            if locked:
                remove_temporary_files(path)
            parts = [np.array([len(array) for array in arrays], "<u8")]
            parts += [np.ascontiguousarray(array, "<i8") for array in arrays]
            hasher = xxhash.xxh3_128()
            for part in parts:
                hasher.update(part.data)
            with atomic_writer(path) as file:
                file.write(_HEADER.pack(_MAGIC, key, hasher.digest(), len(arrays)))
                for part in parts:
                    file.write(part.data)
        except OSError as error:
            warnings.warn(f"--data-cache-path {folder}: the order of samples is not cached: {error}", stacklevel=2)
            return arrays
    return _read_order(path, key) or arrays


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


def _read_order(path: Path, key: bytes) -> _Arrays | None:
    """Return the arrays of a file, mapped and read-only; None if there is no complete file with this key."""
    try:
        # Given a Path, NumPy would look at each of its directories.
        content = np.memmap(str(path), np.uint8, mode="r").data
    except (OSError, ValueError):
        return None
    if len(content) < _HEADER.size:
        return None
    magic, stored_key, digest, count = _HEADER.unpack_from(content)
    begin = _HEADER.size + 8 * count
    if (magic, stored_key) != (_MAGIC, key) or len(content) < begin:
        return None
    lengths = np.frombuffer(content, "<u8", count, _HEADER.size).tolist()
    if len(content) != begin + 8 * sum(lengths) or xxhash.xxh3_128_digest(content[_HEADER.size :]) != digest:
        return None
    return tuple(np.split(np.frombuffer(content, "<i8", sum(lengths), begin), np.cumsum(lengths)[:-1]))
