"""A row of the data benchmark: this program beside a pool of processes that encode line by line.

The loop does what Megatron's `tools/preprocess_data.py` does for a text: a worker takes a line, parses it with the
standard library, encodes the text in one call, and sends a list of ids back; the parent turns it into an array, writes
it, and keeps its length. Its tokenizer is called directly, without transformers around it, which makes it faster than
Megatron's.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_ladder.data.indexed import IndexedDatasetWriter, token_dtype
from megatron_ladder.data.preprocess import PreprocessOptions, preprocess
from megatron_ladder.data.tokenizers import Tokenizer, TokenizerSource, load_source, source_of
from megatron_ladder.lab.bench.data_table import DataBenchmark, DataResult, cpu_seconds
from megatron_ladder.lab.bench.data_text import take_texts, trained_bpe, trained_sentencepiece, write_json_lines
from megatron_ladder.lab.bench.paired import measure

WORKERS = 2
CHUNK_LINES = 32
"""As Megatron hands them to its workers."""
LOOP_SHARE = 0.1
"""Of the text, for the slower way; both are linear in it but for their start."""


class LineEncoder:
    """A worker of the loop."""

    tokenizer: Tokenizer
    """Of this process."""

    @classmethod
    def begin(cls, source: TokenizerSource) -> None:
        """Loads the tokenizer once a process, with one thread."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        cls.tokenizer = load_source(source)

    @classmethod
    def encode(cls, line: str) -> list[int]:
        """Ids of the line's text, and the end of the document."""
        ids = list(cls.tokenizer.encode(json.loads(line)["text"]))
        if ids:
            ids.append(cls.tokenizer.eod_id)
        return ids


def line_by_line(lines: Path, prefix: Path, tokenizer: Tokenizer, workers: int) -> None:
    """The loop."""
    pool = multiprocessing.get_context("spawn").Pool(workers, LineEncoder.begin, (source_of(tokenizer),))
    dtype = token_dtype(tokenizer.vocab_size)
    with open(lines, encoding="utf-8") as file, IndexedDatasetWriter(prefix, dtype) as writer:
        for ids in pool.imap(LineEncoder.encode, file, CHUNK_LINES):
            writer.add_documents(np.array(ids, dtype=dtype), np.array([len(ids)], dtype=np.int32))
        writer.publish()
    pool.close()
    pool.join()


def against_the_loop(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """CPU seconds a MB of the loop over those of this program, both with the same tokenizer and two workers."""
    texts = take_texts(benchmark.megabytes)
    whole, part = benchmark.folder / "whole.jsonl", benchmark.folder / "part.jsonl"
    sizes = {
        "loop": write_json_lines(part, texts[: max(1, int(LOOP_SHARE * len(texts)))]),
        "ours": write_json_lines(whole, texts),
    }
    results = []
    for name, tokenizer, library, target in (
        ("tokenizer.json, fastest library", trained_bpe(benchmark.folder, texts), "auto", 15.0),
        ("SentencePiece, fastest library", trained_sentencepiece(benchmark.folder, texts), "auto", 4.0),
        ("SentencePiece, its own library", trained_sentencepiece(benchmark.folder, texts), "sentencepiece", 1.0),
    ):
        inputs = (part, whole) if library == "auto" else (part, part)
        ways = _ways(benchmark.folder, inputs, tokenizer, library)
        times = measure(ways, benchmark.rounds, clock=cpu_seconds)
        ratio = times.ratio("loop", "ours")
        scale = (sizes["ours"] if library == "auto" else sizes["loop"]) / sizes["loop"]
        speeds = [
            f"{size / 1e6 / times.median(way):.1f}"
            for way, size in (("loop", sizes["loop"]), ("ours", scale * sizes["loop"]))
        ]
        note = f"loop {speeds[0]}, ours {speeds[1]} MB/s of CPU time"
        results.append(
            DataResult("loop", name, scale * ratio.median, "x", target, spread=scale * ratio.spread, note=note)
        )
        benchmark.report(name)
    return results


def _ways(
    folder: Path, inputs: tuple[Path, Path], tokenizer: Tokenizer, library: str
) -> dict[str, Callable[[], object]]:
    options = PreprocessOptions(workers=WORKERS, library=library, report=lambda line: None)
    return {
        "loop": lambda: line_by_line(inputs[0], folder / "loop", tokenizer, WORKERS),
        "ours": lambda: preprocess([inputs[1]], folder / "ours", tokenizer, True, options=options),
    }
