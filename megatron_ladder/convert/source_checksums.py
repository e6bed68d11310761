"""Whether a training checkpoint's files still are what was saved.

Tensors are copied in the order of the model, which is seldom that of their files, and a checksum is of a whole file
from its beginning: so the files are read once more, before anything is written.
"""

from collections.abc import Mapping
from pathlib import Path

from megatron_ladder.checkpoint.checksum import algorithm_of, file_checksum
from megatron_ladder.convert.measures import Measures, Progress, Report
from megatron_ladder.convert.mistakes import raise_mistakes


def damage(path: Path, expected: str, found: str) -> list[str]:
    """The line for a file whose contents have another checksum than its manifest says; none if they agree."""
    if found == expected:
        return []
    return [
        f"{path}: damaged: the manifest has the checksum {expected}, and its contents have {found}: "
        "name another checkpoint with --load"
    ]


def check_sources(checksums: Mapping[Path, str], report: Report, measures: Measures) -> None:
    """Reads files and compares their checksums.

    Args:
        checksums: file -> what its manifest says.

    Raises:
        UserError: a line for each file that is damaged or cannot be read.
    """
    progress = Progress("compared with the manifest", sum(path.stat().st_size for path in checksums), report, measures)
    mistakes = []
    for path, expected in checksums.items():
        try:
            with measures.checksum():
                found = file_checksum(path, progress.add, algorithm_of(expected))
        except OSError as error:
            mistakes.append(f"{path}: cannot be read: {error.strerror}: name another checkpoint with --load")
        else:
            mistakes += damage(path, expected, found)
    raise_mistakes(mistakes)
