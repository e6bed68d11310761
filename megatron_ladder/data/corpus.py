"""The embedded corpus: real text that every machine with a Python already has.

Training text is the source of the running Python's own standard library: 700 files, about 12 MB of code,
comments and English documentation, freely licensed, the same for everyone with the same Python, and large
enough that a small model visibly learns something within minutes. Validation text is
`pydoc_data/topics.py`, the language reference that `help()` prints: related, but never trained on. Nothing
is downloaded.
"""

import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ladder.data.files import write_atomically
from megatron_ladder.data.indexed import idx_path
from megatron_ladder.data.preprocess import PreprocessOptions, dataset_prefix, preprocess
from megatron_ladder.data.sidecar import read_sidecar
from megatron_ladder.data.tokenizers import SentencePieceTokenizer, Tokenizer, train_sentencepiece
from megatron_ladder.errors import UserError

VALIDATION_FILE = Path("pydoc_data", "topics.py")
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
SETTINGS_FILE = "corpus.json"


def library_sources(library: Path) -> list[Path]:
    """The .py files of a standard library in a fixed order, without tests, installed packages, validation
    text, and the few files that are not UTF-8."""
    found = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = set(subfolders) - EXCLUDED_FOLDERS
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return [path for path in sorted(found) if path != library / VALIDATION_FILE and _is_utf8(path)]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def limit_bytes(paths: list[Path], library: Path, limit: float) -> list[Path]:
    """As many files as fit into `limit` bytes (one at least), drawn by the hash of their names, so that
    they come from all over the library; in their former order."""

    def draw(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(library).as_posix().encode()).digest()

    chosen: set[Path] = set()
    total = 0
    for path in sorted(paths, key=draw):
        size = path.stat().st_size
        if total + size <= limit or not chosen:
            chosen.add(path)
            total += size
    return [path for path in paths if path in chosen]


def prepare_corpus(
    output_dir: Path, vocab_size: int, max_megabytes: float | None, report: Callable[[str], None]
) -> None:
    """Makes `tokenizer.model`, `train_text_document.*` and `valid_text_document.*` in `output_dir`.

    What is there already is kept: everything is published by renaming, so what exists is whole.

    Raises:
        UserError: when the directory was made with other settings, or this Python has no sources.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    validation = library / VALIDATION_FILE
    sources = library_sources(library)
    if not sources or not validation.is_file():
        missing = validation if sources else library / "*.py"
        raise UserError(f"{missing}: not found: this Python comes without its sources, use another one")
    _check_settings(output_dir, {"vocab_size": vocab_size, "max_megabytes": max_megabytes})
    if max_megabytes is not None:
        sources = limit_bytes(sources, library, max_megabytes * 1e6)
    size = sum(path.stat().st_size for path in sources)
    report(
        f"corpus: {len(sources)} files, {size / 1e6:.1f} MB of Python {sys.version.split()[0]}'s own library"
    )
    tokenizer = _prepare_tokenizer(output_dir / "tokenizer.model", sources, vocab_size, report)
    for name, inputs in (("train", sources), ("valid", [validation])):
        _prepare_dataset(output_dir / name, inputs, tokenizer, report)


def _check_settings(output_dir: Path, settings: dict[str, Any]) -> None:
    """Settles the directory's settings before anything else is in it, so that no mixture can come about."""
    path = output_dir / SETTINGS_FILE
    output_dir.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_atomically(path, (json.dumps(settings) + "\n").encode())
        return
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if found != settings:
        raise UserError(
            f"--output-dir {output_dir}: was made with {_as_flags(found)}, now asked for "
            f"{_as_flags(settings)}: give another directory or delete this one"
        )


def _as_flags(settings: Any) -> str:
    if not isinstance(settings, dict):
        return "unknown settings"
    given = {key: value for key, value in settings.items() if value is not None}
    return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in given.items())


def _prepare_tokenizer(
    path: Path, sources: list[Path], vocab_size: int, report: Callable[[str], None]
) -> Tokenizer:
    if not path.is_file():
        report(f"tokenizer: training {vocab_size} pieces, some seconds")
        begun = time.monotonic()
        model = train_sentencepiece((source.read_bytes().decode() for source in sources), vocab_size)
        write_atomically(path, model)
        report(f"tokenizer: {path} trained in {time.monotonic() - begun:.1f} s")
    else:
        report(f"tokenizer: {path} is there already")
    return SentencePieceTokenizer(path)


def _prepare_dataset(
    output_prefix: Path, inputs: list[Path], tokenizer: Tokenizer, report: Callable[[str], None]
) -> None:
    prefix = dataset_prefix(output_prefix, "text")
    sidecar = read_sidecar(prefix)
    state = "is there already"
    # The sidecar is published last, so its presence says that the other two are whole.
    if sidecar is None or not idx_path(prefix).is_file() or sidecar.tokenizer_sha256 != tokenizer.sha256:
        options = PreprocessOptions(report=report)
        sidecar = preprocess(inputs, output_prefix, tokenizer, append_eod=True, options=options)["text"]
        state = "written"
    report(
        f"{output_prefix.name}: {prefix} {state}: {sidecar.documents:,} documents, {sidecar.tokens:,} tokens"
    )
