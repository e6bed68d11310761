"""Saves to a file system that fills up at every possible point; run by `test_saving` in a separate mount namespace.

    python -m tests.unit.checkpoint.full_disk DIRECTORY

DIRECTORY is an empty tmpfs of 2 MiB. Prints the errors of saves with 0, 1, 2, ... free pages, until one succeeds.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from megatron_ladder.checkpoint.saving import SaveOptions
from tests.unit.checkpoint.tiny_training import TinyState, holds, on_ranks, save_at_once

PAGE = 4096


def fill(path: Path, free_pages: int) -> None:
    """Leave this many free pages."""
    found = os.statvfs(path.parent)
    path.write_bytes(bytes((found.f_bavail * found.f_frsize // PAGE - free_pages) * PAGE))


def main(folder: Path) -> None:
    save, ballast = folder / "save", folder / "ballast"
    old, new = TinyState(1).whole, TinyState(2).whole
    real = os.statvfs

    def save_new(iteration: int, seed: int) -> list[object]:
        return on_ranks(2, lambda w: save_at_once(save, iteration, TinyState(seed, w.rank, 2), w, SaveOptions()))

    assert save_new(100, 1)[0].error is None
    fill(ballast, 2)
    errors = [[str(answer) for answer in save_new(200, 2)]]
    # Another program takes the room after the save has checked for it.
    os.statvfs = lambda path: SimpleNamespace(f_bavail=1 << 40, f_frsize=PAGE, f_blocks=1 << 40)
    for free_pages in range(100):
        ballast.unlink()
        os.statvfs, lying = real, os.statvfs
        fill(ballast, free_pages)
        os.statvfs = lying
        answers = save_new(200, 2)
        if answers[0].error is None:
            break
        assert answers[1] == answers[0]
        errors.append([str(answers[0].error)])
        assert holds(save, old)
        assert not [entry for entry in save.iterdir() if ".tmp-" in entry.name]
    assert holds(save, new)
    print(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
