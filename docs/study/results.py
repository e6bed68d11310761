"""The results of a study's trials, in one JSON file that is continued after an interruption."""

import json
import threading
from pathlib import Path
from typing import Any

Result = dict[str, Any]


class Results:
    """Results by the names of trials."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it exists."""
        self._path, self._lock = path, threading.Lock()
        self._found: dict[str, Result] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, name: str) -> Result | None:
        """Return the result of a trial, or None if it has not ended."""
        return self._found.get(name)

    def add(self, name: str, result: Result) -> None:
        """Write a result; the file is replaced whole."""
        with self._lock:
            self._found[name] = result
            content = json.dumps(dict(sorted(self._found.items())), indent=1) + "\n"
            self._path.with_suffix(".new").write_text(content)
            self._path.with_suffix(".new").replace(self._path)
