"""Orders of samples kept on disk, so that the processes of a machine share one copy and build it once.

A file `order_<key>.bin` holds arrays of int64 after a header, all little-endian:

    bytes        what
    8            magic `MLORDER` and a digit, the version of this format
    16           XXH3-128 of the description that the order follows from, which is also the file's name
    16           XXH3-128 of everything after the header
    8            u64, number of arrays A
    8 * A        u64, length of each

What an order follows from is all in its description (content of the data, split, seed, sequence length, epoch), so a
file is never out of date, and one that is damaged is built anew. Folders can be shared by runs, and deleted.
"""

import fcntl
import json
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_ladder.data.files import publish, temporary_beside

MAGIC = b"MLORDER1"
FIXED = struct.Struct("<8s16s16sQ")

Arrays = tuple[NDArray[np.int64], ...]


def key_of(description: Mapping[str, Any]) -> bytes:
    """16 bytes that stand for a description, any JSON-able mapping, whatever the order of its keys."""
    return xxhash.xxh3_128_digest(json.dumps(description, sort_keys=True).encode())


def load_or_build(
    folder: Path, description: Mapping[str, Any], build: Callable[[], Sequence[NDArray[np.int64]]]
) -> Arrays:
    """The arrays that follow from `description`: mapped from `folder`, or built and left there for the others.

    Of several processes one builds and the others wait. The lock is the kernel's: it ends with the process that
    holds it. A folder that cannot be locked or written to costs speed and memory, and is no error.
    """
    key = key_of(description)
    path = folder / f"order_{key.hex()}.bin"
    found = read_order(path, key)
    if found is not None:
        return found
    with _locked(path.with_suffix(".lock")) as alone:
        found = read_order(path, key)
        if found is not None:
            return found
        arrays = tuple(build())
        # Without a lock another process may have been faster, and others map its file by now.
        found = None if alone else read_order(path, key)
        if found is not None:
            return found
        try:
            if alone:
                _remove_abandoned(path)
            _write_order(path, key, arrays)
        except OSError as error:
            warnings.warn(f"--data-cache-path {folder}: the order of samples is not kept: {error}", stacklevel=2)
            return arrays
    return read_order(path, key) or arrays


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds an exclusive lock, where the file system has any; whether it does."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield False
        return
    try:
        alone = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            alone = False
            warnings.warn(f"{path}: cannot be locked ({error}): every process builds for itself", stacklevel=4)
        yield alone
    finally:
        os.close(file)


def read_order(path: Path, key: bytes) -> Arrays | None:
    """The arrays of a file, mapped and read-only; None where there is none, or not a whole one of this key."""
    try:
        content = np.memmap(path, np.uint8, mode="r").data
    except (OSError, ValueError):
        return None
    if len(content) < FIXED.size:
        return None
    magic, stored_key, digest, count = FIXED.unpack_from(content)
    begin = FIXED.size + 8 * count
    if (magic, stored_key) != (MAGIC, key) or len(content) < begin:
        return None
    lengths = np.frombuffer(content, "<u8", count, FIXED.size).tolist()
    if len(content) != begin + 8 * sum(lengths) or xxhash.xxh3_128_digest(content[FIXED.size :]) != digest:
        return None
    arrays = []
    for length in lengths:
        arrays.append(np.frombuffer(content, "<i8", length, begin))
        begin += 8 * length
    return tuple(arrays)


def _remove_abandoned(path: Path) -> None:
    """Removes what killed processes left of earlier attempts; only for who holds the lock, since others may write."""
    for abandoned in path.parent.glob(f"{path.name}.*.partial"):
        abandoned.unlink(missing_ok=True)


def _write_order(path: Path, key: bytes, arrays: Arrays) -> None:
    """Publishes a file whole."""
    parts = [np.array([len(array) for array in arrays], "<u8"), *(np.ascontiguousarray(a, "<i8") for a in arrays)]
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part.data)
    temporary = temporary_beside(path)
    try:
        with open(temporary, "xb") as file:
            file.write(FIXED.pack(MAGIC, key, hasher.digest(), len(arrays)))
            for part in parts:
                file.write(part.data)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
