"""Publishing files: written beside under a temporary name, fsynced, renamed. What has its name is whole."""

import os
import secrets
from pathlib import Path


def temporary_beside(path: Path) -> Path:
    """A free name in the same folder, so that renaming it to `path` stays within one file system."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")


def publish(temporary: Path, path: Path) -> None:
    """Renames a file, whose content is already fsynced, and makes the renaming durable."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes what was renamed in a folder, or deleted from it, durable."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a small file whole, or leaves what was there."""
    temporary = temporary_beside(path)
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
