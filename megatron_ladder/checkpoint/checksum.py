"""File checksums, written as "xxh3_128:digits".

XXH3-128 detects damage at memory speed. A checksum inside a checkpoint does not make the checkpoint trustworthy;
containing no code does.
"""

import hashlib
from pathlib import Path

import xxhash

CHUNK_BYTES = 1 << 24
"""Bytes copied from a device at a time: the only extra memory that a save takes."""
PIECE_BYTES = 1 << 19
"""Bytes read or written, and hashed, at a time: few enough to be hashed from a core's cache."""


def checksum_of(data: bytes) -> str:
    """Return the checksum of bytes in memory."""
    return formatted(xxhash.xxh3_128(data))


def formatted(hasher: xxhash.xxh3_128) -> str:
    """Return the checksum of the bytes that a hasher has received."""
    return f"xxh3_128:{hasher.hexdigest()}"


def file_checksum(path: Path) -> str:
    """Read a file and return its checksum."""
    with open(path, "rb", buffering=0) as file:
        return formatted(hashlib.file_digest(file, xxhash.xxh3_128))  # type: ignore[arg-type]
