"""Which checkpoints are kept, and how the others go.

A checkpoint that is to go is renamed first, to the name of a save that died, and then removed: whoever is killed in
between leaves what the next save cleans up, and never a checkpoint with files missing.
"""

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_ladder.checkpoint.publish import (
    published_checkpoints,
    publishing_order,
    read_latest,
    temporary_directory,
)


@dataclass(frozen=True)
class Retention:
    """What is kept besides the newest checkpoint; everything if neither number is given."""

    keep_last: int | None = None
    """So many of the newest."""
    interval: int | None = None
    """Those of iterations that are multiples of it."""
    protected: Path | None = None
    """One that is kept whatever its number: the one that the run was loaded from."""

    def to_remove(self, save: Path) -> list[str]:
        """Names of the checkpoints in a directory that are to go: those whose iteration was saved again, as when they
        were found damaged, which count as none of those that are kept; then the others, the oldest first.

        Checkpoints beyond the one that `latest` names are left alone: they are of a run that went further before
        someone went back, and that is not for us to undo.
        """
        latest = read_latest(save)
        if (self.keep_last is None and self.interval is None) or not latest:
            return []
        passed = [n for n in published_checkpoints(save) if publishing_order(n) <= publishing_order(latest)]
        # In publishing order, so the last of an iteration is its highest repetition.
        newest = list({publishing_order(name)[0]: name for name in passed}.values())
        superseded = [name for name in passed if name not in newest]
        old = [
            name
            for name in newest[: -(self.keep_last or 1)]
            if self.interval is None or publishing_order(name)[0] % self.interval != 0
        ]
        return [
            name
            for name in superseded + old
            if self.protected is None or not _same_directory(save / name, self.protected)
        ]


class Removal(NamedTuple):
    """What became of the checkpoints that were to go."""

    names: tuple[str, ...]
    """Those that are checkpoints no longer."""
    notes: tuple[str, ...]
    """A line for each that stays, or of which files stay."""


def remove_old_checkpoints(save: Path, retention: Retention) -> Removal:
    """Removes what is not to be kept; one rank calls it, after publishing. One that cannot go keeps no other."""
    names, notes = [], []
    for name in retention.to_remove(save):
        doomed = temporary_directory(save, publishing_order(name)[0], secrets.token_hex(8))
        try:
            os.rename(save / name, doomed)
        except OSError as error:
            notes.append(f"{save / name}: is to go and cannot be renamed: {error.strerror or error}")
            continue
        names.append(name)
        try:
            shutil.rmtree(doomed)
        except OSError as error:
            notes.append(f"{doomed}: was {name}, and cannot be removed: {error.strerror or error}")
    return Removal(tuple(names), tuple(notes))


def _same_directory(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)
