"""Builds a small data set from the sources of Python's standard library; nothing is downloaded.

python examples/prepare_corpus.py --output-dir corpus --max-megabytes 1

The text is the code of this Python's standard library: 700 files, about 12 MB of code, comments and English
documentation, the same for everyone with the same Python version. Every twentieth file is held out for validation.
"""

import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from megatron_ladder.command_line import parse_config  # noqa: E402
from megatron_ladder.errors import UserError, run_program  # noqa: E402
from megatron_ladder.files import write_atomically  # noqa: E402
from megatron_ladder.flags import flag  # noqa: E402

HELD_OUT = 20
"""One of so many files is validation text."""
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class CorpusOptions:
    """Output."""

    output_dir: Path = flag(output="directory")
    """Directory for tokenizer.model, train_text_document.* and valid_text_document.*, which are replaced."""
    vocab_size: int = flag(4096, minimum=1)
    """Vocabulary size of the tokenizer, including 256 bytes and 3 control tokens."""
    max_megabytes: float | None = flag(None, above=0)
    """Use approximately this much text; all of it by default."""


def library_sources(library: Path) -> list[Path]:
    """Return the files in a fixed order: no tests, no installed packages, and nothing that is not UTF-8."""
    found = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = set(subfolders) - EXCLUDED_FOLDERS
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            with contextlib.suppress(UnicodeDecodeError):
                path.read_bytes().decode()
                found.append(path)
    return sorted(found)


def limit_bytes(paths: Sequence[Path], library: Path, limit: float) -> list[Path]:
    """Return files of up to `limit` bytes (at least one), selected by the hash of their names, in the given order."""
    chosen: set[Path] = set()
    total = 0
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.relative_to(library).as_posix().encode()).digest()):
        size = path.stat().st_size
        if total + size <= limit or not chosen:
            chosen.add(path)
            total += size
    return [path for path in paths if path in chosen]


def main(argv: Sequence[str]) -> None:
    """Read the command line, train the tokenizer, and tokenize both parts."""
    options = parse_config(CorpusOptions, argv, "prepare_corpus.py", __doc__.partition("\n")[0])
    from megatron_ladder.data.encoding import Task
    from megatron_ladder.data.preprocess import preprocess
    from megatron_ladder.data.tokenizer_training import train_sentencepiece
    from megatron_ladder.tokenizers.sentencepiece import SentencePieceTokenizer

    library = Path(sysconfig.get_paths()["stdlib"])
    sources = library_sources(library)
    if not sources:
        raise UserError(f"{library}: this Python has no source files of its library: use another one")
    if options.max_megabytes is not None:
        sources = limit_bytes(sources, library, options.max_megabytes * 1e6)
    size = sum(path.stat().st_size for path in sources)
    print(f"corpus: {len(sources)} files, {size / 1e6:.1f} MB of the library of Python {sys.version.split()[0]}")
    print(f"tokenizer: training {options.vocab_size} pieces, which takes some seconds", flush=True)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    held_out = sources[::HELD_OUT]
    training = [path for path in sources if path not in held_out]
    model = options.output_dir / "tokenizer.model"
    write_atomically(model, train_sentencepiece((path.read_bytes().decode() for path in training), options.vocab_size))
    tokenizer = SentencePieceTokenizer(model)
    for name, inputs in (("train", training), ("valid", held_out)):
        prefix = options.output_dir / name
        sidecar = preprocess(inputs, prefix, Task(tokenizer, append_eod=True))["text"]
        documents = f"{sidecar.documents:,} document{'s' * (sidecar.documents != 1)}"
        print(f"{name}: {prefix}_text_document: {documents}, {sidecar.tokens:,} tokens")


if __name__ == "__main__":
    run_program(main)
