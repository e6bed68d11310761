"""Counts file-system operations."""

import builtins
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Operations:
    """Records the operations on paths in a folder, such as `open a/b`, by the name of the thread."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self.of_thread = f"{folder}/", dict[str, list[str]]()
        names = "stat lstat open mkdir rmdir listdir scandir rename replace unlink readlink utime statvfs access"
        for module, name in ((io, "open"), (builtins, "open"), *((os, name) for name in names.split())):
            patch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any = ".", *args: Any, **options: Any) -> Any:
            # An opener calls os.open.
            is_path = isinstance(path, str | os.PathLike) and options.get("opener") is None
            if is_path and f"{os.fspath(path)}/".startswith(self._folder):
                line = f"{real.__name__} {os.fspath(path)[len(self._folder) :]}"
                self.of_thread.setdefault(threading.current_thread().name, []).append(line)
            return real(path, *args, **options)

        return counted
