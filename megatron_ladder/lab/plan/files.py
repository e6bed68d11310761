"""Files that are replaced as a whole or not at all."""

import os
from pathlib import Path

from megatron_ladder.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Writes beside, to disk, and renames.

    Raises:
        UserError: the folder is not there, or nothing can be written in it.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
