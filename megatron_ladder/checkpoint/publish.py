"""How a checkpoint is published: written under a temporary name, fsynced, renamed, and then recorded in `latest`.
And how old ones are removed: renamed to a temporary name before any of their files is removed.

    SAVE/iter_0000100/                       a published checkpoint; never written to again
    SAVE/iter_0000100.1/                     the same iteration saved again
    SAVE/iter_0000200.tmp-4f1c/              a save that is running, or that died
    SAVE/latest                              the name of the newest published checkpoint

The process may die between any two calls below: `latest` names a complete checkpoint at every moment, and no published
checkpoint lacks files. The next save removes what was left.
"""

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ladder.checkpoint.manifest import encode_manifest
from megatron_ladder.files import TEMPORARY_SUFFIX, read_if_exists, sync_directory, write_atomically, write_synced

MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest"
REPLACED_FILES = (LATEST_NAME, LATEST_NAME + TEMPORARY_SUFFIX)
"""Files that publishing a checkpoint replaces."""
_PUBLISHED = re.compile(r"iter_\d{7,15}(\.[1-9]\d{0,5})?")
_TEMPORARY = re.compile(r"iter_\d{7,15}\.tmp-[0-9A-Za-z]+")


def temporary_directory(save: Path, iteration: int, token: str) -> Path:
    """Return the directory in which a save is written before it is published; create nothing.

    `token` has letters and digits, and is the same on all ranks and different for each save.
    """
    return save / f"iter_{iteration:07d}.tmp-{token}"


def create_temporary_directory(save: Path, iteration: int, token: str) -> Path:
    """Create the temporary directory of a save, and remove the remains of earlier saves that died.

    One rank calls it before any rank writes. Only directories with a temporary name in which nothing was written since
    this save began are removed; a warning names those that cannot be, such as another user's.
    """
    path = temporary_directory(save, iteration, token)
    os.makedirs(save, exist_ok=True)
    os.mkdir(path)
    began = path.stat().st_mtime_ns
    for other in sorted(save.iterdir()):
        if _TEMPORARY.fullmatch(other.name):
            try:
                if max(entry.lstat().st_mtime_ns for entry in (other, *other.iterdir())) < began:
                    shutil.rmtree(other)
            except FileNotFoundError:
                pass  # another save, still running, renamed a file
            except OSError as error:
                warnings.warn(f"{other}: left by a failed save, cannot be removed: {error}", stacklevel=2)
    return path


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write `manifest.json` atomically into the directory and fsync it."""
    write_atomically(directory / MANIFEST_NAME, encode_manifest(manifest))


def publish(temporary: Path, save: Path, iteration: int) -> Path:
    """Rename a complete temporary directory, make it the latest checkpoint, and return its path.

    One rank calls it after all ranks have fsynced their files and the manifest is written. The name is `iter_` and the
    iteration, with a number if the iteration was saved before.
    """
    sync_directory(temporary)
    taken = [publishing_order(name) for name in published_checkpoints(save)]
    repetitions = [repetition for saved, repetition in taken if saved == iteration]
    suffix = f".{max(repetitions) + 1}" if repetitions else ""
    published = save / f"iter_{iteration:07d}{suffix}"
    # Before the rename: if the disk is full, no checkpoint is left that `latest` does not name.
    current, latest = (save / name for name in REPLACED_FILES)
    write_synced(latest, f"{published.name}\n".encode())
    os.rename(temporary, published)
    sync_directory(save)
    os.replace(latest, current)
    sync_directory(save)
    return published


def published_checkpoints(save: Path) -> list[str]:
    """Return the names of the published checkpoints in a directory, oldest iteration first."""
    if not save.is_dir():
        return []
    names = [entry.name for entry in save.iterdir() if is_published_name(entry.name)]
    return sorted(names, key=publishing_order)


def is_published_name(name: str) -> bool:
    """Return whether a directory of that name is a published checkpoint."""
    return _PUBLISHED.fullmatch(name) is not None


def publishing_order(name: str) -> tuple[int, int]:
    """Return the iteration in a published checkpoint's name, and the number of earlier saves of that iteration."""
    iteration, _, repetition = name.removeprefix("iter_").partition(".")
    return int(iteration), int(repetition or 0)


def read_latest(save: Path) -> str | None:
    """Return the name in the file `latest`: "" if the file has no valid name, None if it does not exist."""
    content = read_if_exists(save / LATEST_NAME)
    name = None if content is None else content.decode(errors="replace").strip()
    return name if name is None or is_published_name(name) else ""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept besides the newest; all of them if neither number is given."""

    keep_last: int | None = None
    """Keep this many of the newest."""
    interval: int | None = None
    """Keep iterations that are multiples of this."""
    protected: Path | None = None
    """Always keep this one: the checkpoint from which the run was loaded."""

    def to_remove(self, save: Path) -> list[str]:
        """Return the names of the checkpoints to remove.

        First come those whose iteration was saved again, for example because they were damaged; they do not count
        towards `keep_last`. Then come the others, oldest first. Checkpoints newer than the one that `latest` names are
        never removed: a user went back to an earlier iteration and may still want them.
        """
        latest = read_latest(save)
        if (self.keep_last is None and self.interval is None) or not latest:
            return []
        candidates = [
            name for name in published_checkpoints(save) if publishing_order(name) <= publishing_order(latest)
        ]
        # In publishing order, so the last of an iteration is its highest repetition.
        newest = list({publishing_order(name)[0]: name for name in candidates}.values())
        superseded = [name for name in candidates if name not in newest]
        old = newest[: -(self.keep_last or 1)]
        if self.interval is not None:
            old = [name for name in old if publishing_order(name)[0] % self.interval != 0]
        protected = self.protected if self.protected is not None and self.protected.exists() else None
        return [name for name in superseded + old if protected is None or not protected.samefile(save / name)]


def remove_old_checkpoints(save: Path, retention: Retention) -> tuple[str, ...]:
    """Remove old checkpoints, on one rank, and return their names; a warning names those that cannot be removed."""
    names = []
    for name in retention.to_remove(save):
        doomed = temporary_directory(save, publishing_order(name)[0], secrets.token_hex(8))
        try:
            os.rename(save / name, doomed)
            names.append(name)
            shutil.rmtree(doomed)
        except OSError as error:
            warnings.warn(f"{save / name}: old checkpoint, cannot be removed: {error}", stacklevel=2)
    return tuple(names)
