"""The training data of a study, and a description of the machine."""

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from megatron_ladder import __version__
from megatron_ladder.data.corpus import prepare_corpus
from megatron_ladder.data.sidecar import read_sidecar
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.sizes import find_size
from megatron_ladder.lab.study.commands import DATA_FIELDS, read_training_flags
from megatron_ladder.lab.study.options import Request

DATA_NAME = "data"
SPLIT = "96,4,0"
"""Split of the default corpus into training and validation, by files."""


@dataclass(frozen=True)
class StudyData:
    """Training and validation data."""

    flags: tuple[str, ...]
    """For the trainer; none if they are given after --."""
    description: str


def prepare_data(request: Request) -> StudyData:
    """Build the default corpus in the study's folder, unless data is given after --.

    Raises:
        UserError: sizes have different vocabularies, or the folder has a corpus with another one.
    """
    data = read_training_flags(request.training_flags, []).data
    if any(getattr(data, name) for name in DATA_FIELDS):
        named = [str(word) for name in DATA_FIELDS for word in _words(getattr(data, name))]
        return StudyData((), f"{' '.join(named)}{_tokens([*data.data_path, *data.train_data_path])}")
    folder = request.options.output_dir / DATA_NAME
    vocabularies = {find_size(size).vocab_size for size in request.options.sizes}
    if len(vocabularies) > 1:
        raise UserError(
            f"--sizes have vocabularies of {', '.join(map(str, sorted(vocabularies)))}, but the default corpus has "
            "one: give sizes with the same vocabulary, or other data after --"
        )
    prepare_corpus(folder, vocabularies.pop(), None, functools.partial(print, flush=True))
    sources = folder / "train_text_document"
    # Validation text of the same kind, because wirings are compared by how well they learn it.
    flags = ("--data-path", str(sources), "--split", SPLIT)
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "tokenizer.model"))
    about = f"the sources of Python {platform.python_version()}'s standard library, the last of them held out"
    return StudyData((*flags, *tokenizer), f"{about} (--split {SPLIT}){_tokens([sources])}")


def _words(value: object) -> Sequence[object]:
    return value if isinstance(value, tuple) else [value] if value else []


def _tokens(prefixes: Sequence[Path]) -> str:
    """Describe the number of tokens of each data set that records it."""
    known = []
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is not None:
            known.append(f"{sidecar.tokens:,} tokens in {prefix.name}")
    return "".join(f", {words}" for words in known)


def describe_machine() -> dict[str, str]:
    """Return processor, cores, GPUs and versions."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    found = {
        "processor": processor,
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "megatron_ladder": __version__,
        "torch": version("torch"),
        "deepspeed": version("deepspeed"),
    }
    gpus = _gpus()
    return {**found, "gpus": gpus} if gpus else found


def _gpus() -> str:
    """Return the names of the GPUs from nvidia-smi; empty without GPUs."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    names = done.stdout.split("\n")[:-1] if done.returncode == 0 else []
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
