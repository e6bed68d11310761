"""Removal of old checkpoints.

A checkpoint is renamed to a temporary name before its files are removed. If the process is killed in between, the next
save removes the rest, and no published checkpoint ever lacks files.
"""

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_ladder.checkpoint.publish import (
    published_checkpoints,
    publishing_order,
    read_latest,
    temporary_directory,
)


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


def remove_old_checkpoints(save: Path, retention: Retention) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Remove old checkpoints; one rank calls it after publishing. A failure does not prevent other removals.

    Returns:
        Names of the removed checkpoints, and one line for each that could not be removed, or not completely.
    """
    names, notes = [], []
    for name in retention.to_remove(save):
        doomed = temporary_directory(save, publishing_order(name)[0], secrets.token_hex(8))
        try:
            os.rename(save / name, doomed)
        except OSError as error:
            notes.append(f"{save / name}: old checkpoint, cannot be renamed: {error.strerror or error}")
            continue
        names.append(name)
        try:
            shutil.rmtree(doomed)
        except OSError as error:
            notes.append(f"{doomed}: formerly {name}, cannot be removed: {error.strerror or error}")
    return tuple(names), tuple(notes)
