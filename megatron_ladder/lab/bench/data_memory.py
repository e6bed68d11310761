"""A row of the data benchmark: memory while a large file is tokenised."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.data_table import DataBenchmark, DataResult
from megatron_ladder.lab.bench.data_text import take_texts, trained_bpe

SIZE_FACTOR = 20
"""The file is so many times as large as the benchmark's text: 2 GB at its default."""
WORKERS = 2
SAMPLE_SECONDS = 0.05
NEW_WORDS_EVERY = 20
"""A word in so many is one that no other document has, so that a memory of words sees new ones for ever."""


def write_large_file(path: Path, megabytes: int, texts: Sequence[str]) -> None:
    """Real texts over and over, each time with other words between theirs."""
    size = number = 0
    with open(path, "wb") as file:
        while size < megabytes * 1_000_000:
            words = texts[number % len(texts)].split(" ")
            words[::NEW_WORDS_EVERY] = [
                f"{word}{number:x}q{place:x}" for place, word in enumerate(words[::NEW_WORDS_EVERY])
            ]
            size += file.write(json.dumps({"text": " ".join(words)}, ensure_ascii=False).encode() + b"\n")
            number += 1


def peak_memory(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Largest sum of what the command and its two workers had in memory at one time, shared pages in each."""
    texts = take_texts(benchmark.megabytes)
    tokenizer = trained_bpe(benchmark.folder, texts)
    megabytes = SIZE_FACTOR * benchmark.megabytes
    write_large_file(benchmark.folder / "large.jsonl", megabytes, texts)
    del texts
    benchmark.report(f"tokenising {megabytes:,} MB")
    command = [
        sys.executable, "-c", "from megatron_ladder.cli.preprocess_data import entry_point; entry_point()",
        "--input", str(benchmark.folder / "large.jsonl"), "--output-prefix", str(benchmark.folder / "out"),
        "--tokenizer-type", tokenizer.kind, "--tokenizer-model", str(tokenizer.files[0]), "--workers", str(WORKERS),
    ]  # fmt: skip
    peaks = {"resident": 0, "proportional": 0}
    with open(benchmark.folder / "log", "wb") as log:
        root = Path(__file__).resolve().parents[3]
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=root) as process:
            while process.poll() is None:
                for name, size in _sizes(process.pid).items():
                    peaks[name] = max(peaks[name], size)
                time.sleep(SAMPLE_SECONDS)
    log_text = (benchmark.folder / "log").read_text()
    if process.returncode:
        raise UserError(f"preprocess_data.py ended with {process.returncode}: {log_text[-2000:]}")
    last = log_text.strip().split("\n")[-2]
    note = f"pages of several processes counted once: {peaks['proportional'] / 1e9:.2f} GB; {last}"
    case = f"{megabytes:,} MB, {WORKERS} workers"
    return [DataResult("memory", case, peaks["resident"] / 1e9, "GB", 1.0, at_most=True, note=note)]


def _sizes(pid: int) -> dict[str, int]:
    sizes = {"resident": 0, "proportional": 0}
    try:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            memory = process.memory_full_info()
            sizes["resident"] += memory.rss
            sizes["proportional"] += memory.pss
    except psutil.Error:
        pass  # One has just ended.
    return sizes
