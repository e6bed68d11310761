"""Checksums of files, written as "algorithm:digits".

XXH3-128 finds damage at the speed of memory. SHA-256, ten times slower, is for those who keep a list of their files
elsewhere; a checkpoint is not made trustworthy by checksums that lie in it, but by having no code in it.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import xxhash

CHUNK_BYTES = 1 << 24
"""Bytes copied from a device at a time: the only memory that saving takes."""
PIECE_BYTES = 1 << 19
"""Bytes hashed and written, or read and hashed, at a time: few enough to lie in a core's cache for the second."""
DEFAULT_CHECKSUM = "xxh3_128"


class Digest(Protocol):
    """What hashlib and xxhash have in common."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Takes in more bytes."""

    def hexdigest(self) -> str:
        """Of all bytes so far."""


CHECKSUMS: Mapping[str, Callable[[], Digest]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
"""The algorithms that a manifest may name."""


def checksum_of(data: bytes, algorithm: str = DEFAULT_CHECKSUM) -> str:
    """The checksum of bytes in memory, in the form in which manifests hold it."""
    digest = CHECKSUMS[algorithm]()
    digest.update(data)
    return f"{algorithm}:{digest.hexdigest()}"


def algorithm_of(checksum: str) -> str:
    """What a checksum was computed with; raises ValueError if that is not known here."""
    algorithm = checksum.partition(":")[0]
    if algorithm not in CHECKSUMS:
        raise ValueError(f"the checksum {checksum!r} is of no known kind: {', '.join(CHECKSUMS)}")
    return algorithm


def file_checksum(path: Path, report_bytes: Callable[[int], None], algorithm: str = DEFAULT_CHECKSUM) -> str:
    """Reads a file and returns its checksum; tells `report_bytes` how many bytes each piece had."""
    digest = CHECKSUMS[algorithm]()
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(PIECE_BYTES, max(1, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            report_bytes(count)
    return f"{algorithm}:{digest.hexdigest()}"
