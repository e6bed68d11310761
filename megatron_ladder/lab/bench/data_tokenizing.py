"""Rows of the data benchmark that tokenize: comparisons with the bare library and with a loop per line, and memory.

The text consists of the source code and documentation of Python's standard library and of the installed packages,
shuffled with a fixed seed. Tokenizers are trained on parts of it.
"""

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from megatron_ladder.data.encoding import UnsupportedTokenizerError, make_encoder
from megatron_ladder.data.indexed import IndexedDatasetWriter, token_dtype
from megatron_ladder.data.preprocess import PreprocessOptions, preprocess
from megatron_ladder.data.tokenizer_training import train_bpe, train_sentencepiece
from megatron_ladder.data.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerSource,
    load_source,
    source_of,
)
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.data_table import DataBenchmark, DataResult, cpu_seconds
from megatron_ladder.lab.bench.paired import measure
from megatron_ladder.processes import interrupts_blocked

_CASES = (
    ("tokenizer.json", "tokenizers", 0.9, 0.1),
    ("tokenizer.json", "gigatoken", 0.6, 2.0),
    ("SentencePiece", "sentencepiece", 0.9, 0.15),
    ("SentencePiece", "gigatoken", 0.6, 1.0),
)
"""Tokenizer, library, target, and share of the text. The start takes the same time with every library, so faster
libraries get more text; in a real run the start is negligible."""

_WORKERS = 2
_CHUNK_LINES = 32
"""Lines that a worker of the loop receives at once, as in Megatron."""
_LOOP_SHARE = 0.1
"""Share of the text for the slower variant; apart from the start, both variants are linear in the size."""

_SIZE_FACTOR = 20
"""Size of the file of the memory row, relative to the benchmark's text: 2 GB by default."""
_SAMPLE_SECONDS = 0.05
_NEW_WORD_INTERVAL = 20
"""One of so many words is unique to its document, so that a cache of words keeps growing."""

_TEXT_SUFFIXES = frozenset({".md", ".py", ".pyi", ".rst", ".txt"})
_MAX_CHARACTERS = 1_000_000
"""Longer files are generated tables."""
_TRAINING: dict[str, tuple[Callable[[Sequence[str], int], bytes], int, int, Callable[[Path], Tokenizer]]] = {
    "tokenizer.json": (train_bpe, 1000, 32_000, HuggingFaceTokenizer),
    "SentencePiece": (train_sentencepiece, 300, 8_000, SentencePieceTokenizer),
}
"""Tokenizer -> training, number of texts and ids, and class. SentencePiece takes more than a minute with more texts."""


def tokenizer_shares(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Compare the speed from JSON lines to published token files, including the start, with that of the bare library.

    The bare library encodes texts in memory, one by one or in a batch, without caches (see `_FreshEncoder`).
    """
    texts = _take_texts(max(share for *_, share in _CASES) * benchmark.megabytes)
    tokenizers = {name: _train(name, benchmark.folder, texts) for name in _TRAINING}
    results = []
    for name, library, target, share in _CASES:
        sizes = itertools.accumulate(map(len, texts))
        limit = share * benchmark.megabytes * 1e6
        part = [text for text, size in zip(texts, sizes, strict=True) if size <= limit] or texts[:1]
        try:
            results.append(_share(benchmark, name, tokenizers[name], library, target, part))
        except UnsupportedTokenizerError as error:
            results.append(DataResult("tokenizers", f"{name}, {library}", None, "", target, note=str(error)))
        benchmark.report(f"{name} on {library}")
    return results


class _FreshEncoder:
    """An encoder without cached words and texts without cached UTF-8, renewed untimed before each use."""

    def __init__(self, tokenizer: Tokenizer, library: str, texts: Sequence[str]) -> None:
        self._tokenizer, self._library = tokenizer, library
        self._encoder = make_encoder(tokenizer, library)
        self.texts = list(texts)

    def renew(self) -> None:
        self._encoder = make_encoder(self._tokenizer, self._library)
        self.texts = [text.encode().decode() for text in self.texts]

    def encode(self) -> object:
        # Encoders work on demand.
        return list(self._encoder.encode(self.texts))


def _share(
    benchmark: DataBenchmark, name: str, tokenizer: Tokenizer, library: str, target: float, texts: Sequence[str]
) -> DataResult:
    lines = benchmark.folder / "text.jsonl"
    size = _write_json_lines(lines, texts)
    fresh = _FreshEncoder(tokenizer, library, texts)
    options = PreprocessOptions(library=library, report=lambda line: None)
    ways: dict[str, Callable[[], object]] = {
        "bare": fresh.encode if library == "gigatoken" else lambda: tokenizer.encode_batch(fresh.texts),
        "whole": lambda: preprocess([lines], benchmark.folder / "speed", tokenizer, True, options=options),
    }
    times = measure(ways, benchmark.rounds, before_each=lambda _: fresh.renew(), clock=cpu_seconds)
    share = times.ratio("bare", "whole")
    speeds = [f"{size / 1e6 / times.median(way):.1f}" for way in ("bare", "whole")]
    note = f"{size / 1e6:.0f} MB; bare {speeds[0]}, whole {speeds[1]} MB/s of CPU time"
    case = f"{name}, {library}"
    return DataResult("tokenizers", case, share.median, "of bare", target, spread=share.spread, note=note)


@functools.cache
def _load_in_worker(source: TokenizerSource) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return load_source(source)


def _encode_line(source: TokenizerSource, line: str) -> list[int]:
    """Return the ids of the line's text, followed by the end-of-document token; runs in a worker of the loop."""
    tokenizer = _load_in_worker(source)
    ids = tokenizer.encode(json.loads(line)["text"])
    return [*ids, tokenizer.eod_id] if ids else ids


def _preprocess_line_by_line(lines: Path, prefix: Path, tokenizer: Tokenizer) -> None:
    """Tokenize like Megatron's `tools/preprocess_data.py`, but with the tokenizer called directly, which is faster.

    A worker receives a line, parses it, encodes the text in one call, and returns a list of ids. The parent converts it
    to an array, writes it, and records its length.
    """
    encode, dtype = functools.partial(_encode_line, source_of(tokenizer)), token_dtype(tokenizer.vocab_size)
    with open(lines, encoding="utf-8") as file, IndexedDatasetWriter(prefix, dtype) as writer:
        with interrupts_blocked():
            pool = multiprocessing.get_context("spawn").Pool(_WORKERS)
        for ids in pool.imap(encode, file, _CHUNK_LINES):
            writer.add_document(ids)
        writer.publish()
    pool.close()
    pool.join()


def loop_ratios(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Compare the CPU seconds per MB of the loop with those of this program, with the same tokenizer and workers."""
    texts = _take_texts(benchmark.megabytes)
    whole, part = benchmark.folder / "whole.jsonl", benchmark.folder / "part.jsonl"
    loop_size = _write_json_lines(part, texts[: max(1, int(_LOOP_SHARE * len(texts)))])
    our_size = _write_json_lines(whole, texts)
    sentencepiece = _train("SentencePiece", benchmark.folder, texts)
    results = []
    for name, tokenizer, library, target in (
        ("tokenizer.json, fastest library", _train("tokenizer.json", benchmark.folder, texts), "auto", 15.0),
        ("SentencePiece, fastest library", sentencepiece, "auto", 4.0),
        ("SentencePiece, its own library", sentencepiece, "sentencepiece", 1.0),
    ):
        ours, size = (whole, our_size) if library == "auto" else (part, loop_size)
        options = PreprocessOptions(workers=_WORKERS, library=library, report=lambda line: None)
        ways: dict[str, Callable[[], object]] = {
            "loop": functools.partial(_preprocess_line_by_line, part, benchmark.folder / "loop", tokenizer),
            "ours": functools.partial(preprocess, [ours], benchmark.folder / "ours", tokenizer, True, options=options),
        }
        times = measure(ways, benchmark.rounds, clock=cpu_seconds)
        ratio, scale = times.ratio("loop", "ours"), size / loop_size
        speeds = [f"{of_way / 1e6 / times.median(way):.1f}" for way, of_way in (("loop", loop_size), ("ours", size))]
        note = f"loop {speeds[0]}, ours {speeds[1]} MB/s of CPU time"
        figure, spread = scale * ratio.median, scale * ratio.spread
        results.append(DataResult("loop", name, figure, "x", target, spread=spread, note=note))
        benchmark.report(name)
    return results


def peak_memory(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Measure the largest total memory of the command and its two workers, counting shared pages in each process."""
    texts = _take_texts(benchmark.megabytes)
    tokenizer = _train("tokenizer.json", benchmark.folder, texts)
    megabytes = _SIZE_FACTOR * benchmark.megabytes
    _write_large_file(benchmark.folder / "large.jsonl", megabytes, texts)
    del texts
    benchmark.report(f"tokenizing {megabytes:,} MB")
    command = [
        sys.executable,
        "-c",
        "from megatron_ladder.cli.preprocess_data import entry_point; entry_point()",
        "--input",
        str(benchmark.folder / "large.jsonl"),
        "--output-prefix",
        str(benchmark.folder / "out"),
        "--tokenizer-type",
        tokenizer.kind,
        "--tokenizer-model",
        str(tokenizer.files[0]),
        "--workers",
        str(_WORKERS),
    ]
    peaks = {"resident": 0, "proportional": 0}
    begun = time.monotonic()
    with open(benchmark.folder / "log", "wb") as log:
        root = Path(__file__).resolve().parents[3]
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=root) as process:
            while process.poll() is None:
                for name, size in _memory_of(process.pid).items():
                    peaks[name] = max(peaks[name], size)
                time.sleep(_SAMPLE_SECONDS)
    if process.returncode:
        log_text = (benchmark.folder / "log").read_text()
        raise UserError(f"preprocess_data.py ended with {process.returncode}: {log_text[-2000:]}")
    speed = megabytes / (time.monotonic() - begun)
    note = f"shared pages counted once: {peaks['proportional'] / 1e9:.2f} GB; {speed:.1f} MB/s"
    case = f"{megabytes:,} MB, {_WORKERS} workers"
    return [DataResult("memory", case, peaks["resident"] / 1e9, "GB", 1.0, at_most=True, note=note)]


def _memory_of(pid: int) -> dict[str, int]:
    sizes = {"resident": 0, "proportional": 0}
    with contextlib.suppress(psutil.Error):  # A process may end meanwhile.
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            memory = process.memory_full_info()
            sizes["resident"] += memory.rss
            sizes["proportional"] += memory.pss
    return sizes


def _write_large_file(path: Path, megabytes: int, texts: Sequence[str]) -> None:
    """Write the texts repeatedly, each time with other unique words."""
    size = number = 0
    with open(path, "wb") as file:
        while size < megabytes * 1_000_000:
            words = texts[number % len(texts)].split(" ")
            replaced = enumerate(words[::_NEW_WORD_INTERVAL])
            words[::_NEW_WORD_INTERVAL] = [f"{word}{number:x}q{place:x}" for place, word in replaced]
            size += file.write(json.dumps({"text": " ".join(words)}, ensure_ascii=False).encode() + b"\n")
            number += 1


def _real_texts() -> Iterator[str]:
    paths = sysconfig.get_paths()
    folders = dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))
    # The directory of packages may be inside that of the standard library.
    files = list(dict.fromkeys(path for folder in folders for path in sorted(folder.rglob("*"))))
    random.Random(0).shuffle(files)
    for path in files:
        if path.suffix not in _TEXT_SUFFIXES:
            continue
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if 0 < len(text) <= _MAX_CHARACTERS:
            yield text


def _take_texts(megabytes: float) -> list[str]:
    """Return about `megabytes` of real texts, which are repeated if there are fewer."""
    texts: list[str] = []
    size = 0
    for text in itertools.cycle(_real_texts()):
        texts.append(text)
        size += len(text)
        if size >= megabytes * 1e6:
            break
    return texts


def _write_json_lines(path: Path, texts: Sequence[str]) -> int:
    """Return the size of the file in bytes."""
    with open(path, "wb") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"text": text, "id": number}, ensure_ascii=False).encode() + b"\n")
    return path.stat().st_size


def _train(name: str, folder: Path, texts: Sequence[str]) -> Tokenizer:
    train, text_count, vocab_size, load = _TRAINING[name]
    path = folder / name
    path.write_bytes(train(texts[:text_count], vocab_size))
    return load(path)
