"""Real text for the data benchmark: what every machine with this program has.

The sources and documents of Python's standard library and of the installed packages, shuffled by a fixed seed.
"""

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = frozenset({".md", ".py", ".pyi", ".rst", ".txt"})
LARGEST_TEXT = 1_000_000
"""Longer files are generated tables."""


def real_texts() -> Iterator[str]:
    """Contents of files in an order that is the same for the same installation."""
    paths = sysconfig.get_paths()
    folders = dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))
    files = [
        path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES and path.is_file()
    ]
    files = list(dict.fromkeys(files))
    random.Random(0).shuffle(files)
    for path in files:
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if 0 < len(text) <= LARGEST_TEXT:
            yield text


def write_json_lines(path: Path, megabytes: int) -> list[str]:
    """Writes about so many MB of text as JSON lines, over again where there is less, and returns the texts."""
    texts: list[str] = []
    size = 0
    found = list(real_texts())
    with open(path, "wb") as file:
        while size < megabytes * 1_000_000:
            text = found[len(texts) % len(found)]
            texts.append(text)
            size += file.write(json.dumps({"text": text, "id": len(texts)}, ensure_ascii=False).encode() + b"\n")
    return texts
