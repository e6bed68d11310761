"""Atomic file replacement, durable directories, and advisory locks.

A file that has its final name is complete. Its content is written under a temporary name in the same directory,
fsynced, and renamed; then the directory is fsynced, so that the rename survives a crash of the machine.
"""

import errno
import fcntl
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from megatron_ladder.errors import UserError

TEMPORARY_SUFFIX = ".partial"
_POINTER = b"version https://git-lfs.github.com/spec/"
OutputKind = Literal["file", "directory", "prefix"]
"""Kind of an output path; a prefix is the beginning of the names of several files."""


def hub_hint(missing: Path) -> str:
    """Return how to download a missing path that looks like a name on the Hugging Face hub; empty for other paths."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(missing)) or missing.parent.exists():
        return ""
    return (
        "; if this is a name on the Hugging Face hub, run "
        f"`hf download {missing} --local-dir {missing.name}`, and give {missing.name}"
    )


def check_directory(path: Path, flag: str = "") -> None:
    """Raise a UserError about a flag unless a path is a directory."""
    if not path.is_dir():
        problem = "is a file, expected a directory" if path.exists() else f"no such directory{hub_hint(path)}"
        raise UserError(f"{flag} {path}: {problem}".strip())


def reject_pointer(path: Path, beginning: bytes | None = None) -> None:
    """Raise a UserError if Git LFS left a pointer instead of a file's content, whose `beginning` may be known."""
    if beginning is None:
        with open(path, "rb") as file:
            beginning = file.read(len(_POINTER))
    if beginning.startswith(_POINTER):
        raise UserError(
            f"{path}: contains only the address of its content in Git LFS: download it again, with `git lfs pull` in "
            "its repository, or with `hf download`"
        )


def read_if_exists(path: Path) -> bytes | None:
    """Return the content of a file, or None without one, in one operation; raise UserError for a Git LFS pointer."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    reject_pointer(path, content)
    return content


def temporary_path(path: Path) -> Path:
    """Return an unused name next to `path`, so that renaming it to `path` stays within one file system."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")


def remove_temporary_files(path: Path) -> None:
    """Remove the temporary files that killed writers of `path` left; the caller must be the only writer."""
    for abandoned in path.parent.glob(f"{path.name}.*{TEMPORARY_SUFFIX}"):
        abandoned.unlink(missing_ok=True)


def output_problem(path: Path, kind: OutputKind) -> str | None:
    """Return why an output cannot be written, or None; leave nothing behind. Missing directories are no problem."""
    if kind == "prefix" and not path.name:
        return "expected the beginning of a file name"
    if kind == "file" and path.exists():
        if path.is_dir():
            return "is a directory"
        return None if os.access(path, os.W_OK) else "is not writable"
    folder = path if kind == "directory" else path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a directory"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} is not writable: {error.strerror}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an error of the block without a file name: a full disk has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end of the block; an error leaves `path` as it was."""
    temporary = temporary_path(path)
    try:
        with naming(path):
            with open(temporary, "xb") as file:
                yield file
                _sync_file(file)
            publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file in one step: a reader finds either the old content or the new. Text is written as UTF-8."""
    with atomic_writer(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_synced(path: Path, content: bytes) -> None:
    """Write and fsync a file under a name that does not need to be atomic, such as a temporary one."""
    with naming(path), open(path, "wb") as file:
        file.write(content)
        _sync_file(file)


def publish(temporary: Path, path: Path) -> None:
    """Rename a fsynced file or directory to its final name, and make the rename durable."""
    os.replace(temporary, path)
    sync_directory(path.parent)


def _sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames, creations and deletions in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(descriptor: int) -> OSError | None:
    """Take the kernel's exclusive lock on an open file or directory.

    The lock ends when its file is closed, so also when its holder is killed. The `filelock` package is not used: it
    cannot lock a directory or a file that is already open, and without kernel locks it falls back to marker files,
    which outlive a killed holder.

    Return None if the lock is held; the error if the file system has no locks, so that others cannot be kept away.
    Raise BlockingIOError if another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise BlockingIOError(error.errno, error.strerror) from None
        return error
    return None
