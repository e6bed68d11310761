"""How a checkpoint becomes one: written beside, fsynced, renamed, and only then named by `latest`.

    SAVE/iter_0000100/                       a published checkpoint; never written to again
    SAVE/iter_0000100.1/                     the same iteration saved once more
    SAVE/iter_0000200.tmp-4f1c/              a save that is running, or that died
    SAVE/latest                              the name of the newest published checkpoint

A process may die between any two calls below: `latest` names a complete checkpoint at every moment.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_ladder.checkpoint.checksum import DEFAULT_CHECKSUM
from megatron_ladder.checkpoint.manifest import encode_manifest

MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest"

_PUBLISHED = re.compile(r"iter_(\d{7,15})(?:\.([1-9]\d{0,5}))?")
_TEMPORARY = re.compile(r"iter_\d{7,15}\.tmp-[0-9A-Za-z]+")


def temporary_directory(save: Path, iteration: int, token: str) -> Path:
    """Where the save of an iteration is written before it is published; makes nothing.

    Args:
        save: the directory of all checkpoints of a run.
        token: letters and digits on which all ranks of this save have agreed, new for each save.

    Raises:
        ValueError: the token has other characters, or none.
    """
    path = save / f"iter_{iteration:07d}.tmp-{token}"
    if _TEMPORARY.fullmatch(path.name) is None:
        raise ValueError(f"iteration {iteration} with token {token!r} does not name a temporary directory")
    return path


def create_temporary_directory(
    save: Path, iteration: int, token: str, note: Callable[[str], None] = lambda line: None
) -> Path:
    """Makes the temporary directory of a save, and removes what saves that died before it have left.

    One rank calls it before any writes. Only directories named like temporary ones are removed, and of those
    only the ones in which nothing was written since this save began.

    Args:
        note: is told of each that cannot be removed, as another user's in a shared directory: that is no reason not
            to save.

    Raises:
        FileExistsError: the token was used before.
        OSError: the directory cannot be made.
    """
    path = temporary_directory(save, iteration, token)
    os.makedirs(save, exist_ok=True)
    os.mkdir(path)
    began = path.stat().st_mtime_ns
    try:
        others = sorted(other for other in save.iterdir() if _TEMPORARY.fullmatch(other.name))
    except OSError as error:
        note(f"{save}: what saves have left is not removed: {error.strerror or error}")
        return path
    for other in others:
        try:
            _remove_if_dead(other, began)
        except FileNotFoundError:
            pass  # a save that is alive renames its files
        except OSError as error:
            note(f"{other}: was left by a save and cannot be removed: {error.strerror or error}")
    return path


def _remove_if_dead(directory: Path, began: int) -> None:
    if directory.is_symlink() or not directory.is_dir():
        return
    if max(entry.lstat().st_mtime_ns for entry in (directory, *directory.iterdir())) < began:
        shutil.rmtree(directory)


def write_manifest(directory: Path, manifest: Mapping[str, Any], algorithm: str = DEFAULT_CHECKSUM) -> None:
    """Writes `manifest.json` into the directory, whole or not at all, and fsyncs it.

    Raises:
        ValueError, TypeError: something in the manifest is not JSON.
    """
    write_whole(directory / MANIFEST_NAME, encode_manifest(manifest, algorithm))


def publish(temporary: Path, save: Path, iteration: int) -> Path:
    """Gives a complete temporary directory its name and makes it the latest checkpoint.

    One rank calls it, after all ranks have fsynced their files and the manifest is written.

    Returns:
        The published directory: `iter_` and the iteration, with a number if that was saved before.

    Raises:
        ValueError: the directory has no manifest.
    """
    if not (temporary / MANIFEST_NAME).is_file():
        raise ValueError(f"{temporary} has no {MANIFEST_NAME}: it is not complete")
    _fsync_directory(temporary)
    published = _free_name(save, iteration)
    # Before the rename, so that a disk that is full by now leaves no checkpoint that `latest` does not name.
    latest = _write_beside(save / LATEST_NAME, f"{published.name}\n".encode())
    os.rename(temporary, published)
    _fsync_directory(save)
    os.replace(latest, save / LATEST_NAME)
    _fsync_directory(save)
    return published


def published_checkpoints(save: Path) -> list[str]:
    """Names of the published checkpoints in a directory, oldest iteration first; [] if it does not exist."""
    if not save.is_dir():
        return []
    names = [entry.name for entry in save.iterdir() if is_published_name(entry.name)]
    return sorted(names, key=publishing_order)


def is_published_name(name: str) -> bool:
    """Whether a directory of that name is a published checkpoint."""
    return _PUBLISHED.fullmatch(name) is not None


def publishing_order(name: str) -> tuple[int, int]:
    """The iteration of a published checkpoint's name, and how often it had been saved before.

    Raises:
        ValueError: it is not such a name.
    """
    match = _PUBLISHED.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a published checkpoint")
    return int(match[1]), int(match[2] or 0)


def read_latest(save: Path) -> str | None:
    """The name in the file `latest`, "" if it holds none; None if there is no such file."""
    try:
        with open(save / LATEST_NAME, "rb") as file:
            name = file.read(256).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError:
        return ""
    return name if is_published_name(name) else ""


def _free_name(save: Path, iteration: int) -> Path:
    taken = [publishing_order(name) for name in published_checkpoints(save)]
    again = [repetition for saved, repetition in taken if saved == iteration]
    return save / (f"iter_{iteration:07d}.{max(again) + 1}" if again else f"iter_{iteration:07d}")


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file in one step, so that a reader finds the old bytes or the new ones, and fsyncs it."""
    os.replace(_write_beside(path, data), path)
    _fsync_directory(path.parent)


def _write_beside(path: Path, data: bytes) -> Path:
    beside = path.with_name(path.name + ".tmp")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return beside


def _fsync_directory(path: Path) -> None:
    """Makes the names in a directory outlive a crash of the machine, not only of the process."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
