"""File checksums, written as "algorithm:digits".

XXH3-128 detects damage at memory speed. SHA-256 is about ten times slower and serves users who keep a list of hashes
elsewhere. A checksum inside a checkpoint does not make the checkpoint trustworthy; containing no code does.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

CHUNK_BYTES = 1 << 24
"""Bytes copied from a device at a time: the only extra memory that a save takes."""
PIECE_BYTES = 1 << 19
"""Bytes read or written, and hashed, at a time: few enough to be hashed from a core's cache."""
DEFAULT_CHECKSUM = "xxh3_128"
CHECKSUMS: Mapping[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
"""The algorithms that a manifest may name, as constructors of hashlib's interface."""


def checksum_of(data: bytes, algorithm: str = DEFAULT_CHECKSUM) -> str:
    """Return the checksum of bytes in memory."""
    digest = CHECKSUMS[algorithm]()
    digest.update(data)
    return f"{algorithm}:{digest.hexdigest()}"


def algorithm_of(checksum: str) -> str:
    """Return the algorithm of a checksum; raise ValueError if it is unknown."""
    algorithm = checksum.partition(":")[0]
    if algorithm not in CHECKSUMS:
        raise ValueError(f"unknown checksum {checksum!r}: expected one of {', '.join(CHECKSUMS)}")
    return algorithm


def file_checksum(
    path: Path, report_bytes: Callable[[int], None] = lambda count: None, algorithm: str = DEFAULT_CHECKSUM
) -> str:
    """Read a file and return its checksum; `report_bytes` receives the size of each piece."""
    digest = CHECKSUMS[algorithm]()
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(PIECE_BYTES, max(1, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            report_bytes(count)
    return f"{algorithm}:{digest.hexdigest()}"


def file_error(path: Path, expected: str, report_bytes: Callable[[int], None]) -> str | None:
    """Return an error message if a file cannot be read or does not have the checksum that its manifest records."""
    try:
        return _mismatch(path, expected, file_checksum(path, report_bytes, algorithm_of(expected)))
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"


def _mismatch(path: Path, expected: str, found: str) -> str | None:
    """Return an error message if two checksums of a file differ."""
    return None if found == expected else f"{path}: damaged: the manifest records {expected}, the contents have {found}"
