"""The embedded corpus: real text that exists on every machine with Python.

Training text is the source code of the running Python's standard library: 700 files, about 12 MB of code, comments and
English documentation. It is freely licensed, the same for everyone with the same Python version, and large enough that
a small model learns something within minutes. Validation text is `pydoc_data/topics.py`, the language reference that
`help()` prints: related, but not trained on. Nothing is downloaded.
"""

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ladder.data.indexed import idx_path
from megatron_ladder.data.partial import dataset_prefix
from megatron_ladder.data.preprocess import PreprocessOptions, preprocess
from megatron_ladder.data.sidecar import read_sidecar
from megatron_ladder.data.tokenizer_training import train_sentencepiece
from megatron_ladder.data.tokenizers import SentencePieceTokenizer
from megatron_ladder.errors import UserError
from megatron_ladder.files import write_atomically

_VALIDATION_FILE = Path("pydoc_data", "topics.py")
_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_SETTINGS_FILE = "corpus.json"


def _library_sources(library: Path) -> list[Path]:
    """Return the .py files of a standard library in a fixed order, without tests, installed packages, the validation
    text, and the few files that are not UTF-8."""
    found = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = set(subfolders) - _EXCLUDED_FOLDERS
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            with contextlib.suppress(UnicodeDecodeError):
                path.read_bytes().decode()
                found.append(path)
    return sorted(path for path in found if path != library / _VALIDATION_FILE)


def _limit_bytes(paths: list[Path], library: Path, limit: float) -> list[Path]:
    """Return files of up to `limit` bytes (at least one), selected by the hash of their names, in the given order."""
    chosen: set[Path] = set()
    total = 0
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.relative_to(library).as_posix().encode()).digest()):
        size = path.stat().st_size
        if total + size <= limit or not chosen:
            chosen.add(path)
            total += size
    return [path for path in paths if path in chosen]


def prepare_corpus(
    output_dir: Path, vocab_size: int, max_megabytes: float | None, report: Callable[[str], None]
) -> None:
    """Create `tokenizer.model`, `train_text_document.*` and `valid_text_document.*` in `output_dir` unless they exist.

    Raises UserError if the directory was made with other settings, or if this Python has no source files.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    validation = library / _VALIDATION_FILE
    sources = _library_sources(library)
    if not sources or not validation.is_file():
        missing = validation if sources else library / "*.py"
        raise UserError(f"{missing}: not found: this Python has no source files, use another one")
    _check_settings(output_dir, {"vocab_size": vocab_size, "max_megabytes": max_megabytes})
    if max_megabytes is not None:
        sources = _limit_bytes(sources, library, max_megabytes * 1e6)
    size = sum(path.stat().st_size for path in sources)
    report(f"corpus: {len(sources)} files, {size / 1e6:.1f} MB of the library of Python {sys.version.split()[0]}")
    model = output_dir / "tokenizer.model"
    if model.is_file():
        report(f"tokenizer: {model} exists")
    else:
        report(f"tokenizer: training {vocab_size} pieces, which takes some seconds")
        begun = time.monotonic()
        write_atomically(model, train_sentencepiece((path.read_bytes().decode() for path in sources), vocab_size))
        report(f"tokenizer: {model} trained in {time.monotonic() - begun:.1f} s")
    tokenizer = SentencePieceTokenizer(model)
    for name, inputs in (("train", sources), ("valid", [validation])):
        prefix = dataset_prefix(output_dir / name, "text")
        sidecar, state = read_sidecar(prefix), "exists"
        # The sidecar is published last, so the other two files are complete if it exists.
        if sidecar is None or not idx_path(prefix).is_file() or sidecar.tokenizer_sha256 != tokenizer.sha256:
            options = PreprocessOptions(report=report)
            sidecar = preprocess(inputs, output_dir / name, tokenizer, append_eod=True, options=options)["text"]
            state = "written"
        report(f"{name}: {prefix} {state}: {sidecar.documents:,} documents, {sidecar.tokens:,} tokens")


def _check_settings(output_dir: Path, settings: dict[str, Any]) -> None:
    """Write or compare the directory's settings before any other file, so that settings never mix."""
    path = output_dir / _SETTINGS_FILE
    output_dir.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_atomically(path, json.dumps(settings) + "\n")
        return
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if found != settings:
        raise UserError(
            f"--output-dir {output_dir}: was made with {_as_flags(found)}, not with "
            f"{_as_flags(settings)}: give another directory or delete this one"
        )


def _as_flags(settings: Any) -> str:
    if not isinstance(settings, dict):
        return "unknown settings"
    given = {key: value for key, value in settings.items() if value is not None}
    return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in given.items())
