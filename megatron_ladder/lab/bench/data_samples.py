"""Rows of the data benchmark for indexed data sets: reading samples, building their order, detecting damage."""

import multiprocessing
import resource
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.indexed import IndexedDataset, IndexedDatasetWriter, bin_path, idx_path
from megatron_ladder.data.inspect import verify
from megatron_ladder.data.samples import DOCUMENTS, SAMPLES, SampleRows, SampleSource, joined_starts, permutation
from megatron_ladder.data.sidecar import Sidecar, write_sidecar
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.data_table import DataBenchmark, DataResult, cpu_seconds
from megatron_ladder.lab.bench.paired import measure
from megatron_ladder.processes import interrupts_blocked

_SEQ_LENGTH = 2048
_BATCH = 64
_READ_SAMPLES = 16_384
"""Samples per round, of which `_BATCH` are read at once."""
_TOKENS = 50_000_000
_DOCUMENT_TOKENS = 1_100
_INDEXED_DOCUMENTS = 10_000_000


def read_samples(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Measure samples per CPU second into existing arrays, next to plain copies from the mapped file."""
    tokens = np.random.default_rng(0).integers(0, 50_000, _TOKENS, dtype=np.uint16)
    several = _TOKENS // _DOCUMENT_TOKENS
    lengths = {"short": np.full(several, _DOCUMENT_TOKENS), "one": np.array([several * _DOCUMENT_TOKENS])}
    sources = {}
    for name, of_documents in lengths.items():
        prefix = benchmark.folder / name
        _write_dataset(prefix, tokens[: several * _DOCUMENT_TOKENS], of_documents.astype(np.int32))
        sources[name] = SampleSource(IndexedDataset(prefix), range(len(of_documents)), _SEQ_LENGTH, 1, shuffle=True)
    out = SampleRows(np.empty((_BATCH, _SEQ_LENGTH + 1), np.uint16), None)
    places = [np.arange(begin, begin + _BATCH) for begin in range(0, _READ_SAMPLES, _BATCH)]

    def read(source: SampleSource) -> None:
        for numbers in places:
            source.fill(numbers, np.arange(_BATCH), out)

    mapped = np.asarray(np.memmap(bin_path(benchmark.folder / "one"), np.uint16, "r"))
    begins = (permutation(len(sources["one"]), 2, 0, SAMPLES)[:_READ_SAMPLES] * _SEQ_LENGTH).tolist()

    def copy() -> None:
        for place, begin in enumerate(begins):
            out.tokens[place % _BATCH] = mapped[begin : begin + _SEQ_LENGTH + 1]

    ways: dict[str, Callable[[], object]] = {
        "short": lambda: read(sources["short"]),
        "one": lambda: read(sources["one"]),
        "copy": copy,
    }
    times = measure(ways, benchmark.rounds, clock=cpu_seconds)
    rates = {name: np.array([_READ_SAMPLES / seconds for seconds in times.seconds[name]]) for name in ways}
    ratios = rates["one"] / rates["copy"]
    return [
        _result("samples", "of shuffled documents of 1,100 tokens", rates["short"], "samples/s", 50_000),
        _result("samples", "in one document", rates["one"], "samples/s", None),
        _result("samples", "plain copies", rates["copy"], "samples/s", None),
        _result("samples", "in one document / plain copies", ratios, "", 0.5),
    ]


def _result(row: str, case: str, figures: NDArray[np.float64], unit: str, target: float | None) -> DataResult:
    low, middle, high = np.quantile(figures, [0.25, 0.5, 0.75]).tolist()
    return DataResult(row, case, middle, unit, target, spread=high - low)


def _write_dataset(prefix: Path, tokens: NDArray[np.uint16], lengths: NDArray[np.int32]) -> None:
    with IndexedDatasetWriter(prefix, tokens.dtype) as writer:
        writer.add_documents(tokens, lengths)
        bin_checksum, idx_checksum = writer.publish()
    sidecar = Sidecar(
        "NullTokenizer",
        "0" * 64,
        1 << 16,
        0,
        False,
        int(tokens.max()),
        len(lengths),
        len(tokens),
        bin_checksum=bin_checksum,
        idx_checksum=idx_checksum,
    )
    write_sidecar(prefix, sidecar)


def time_orders(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Build the order of an epoch of 10 million documents in a separate process, and measure its memory."""
    with interrupts_blocked():
        workers = multiprocessing.get_context("spawn").Pool(1)
    with workers as pool:
        rounds = np.array([pool.apply(_time_index) for _ in range(benchmark.rounds)])
    sample_index, whole, megabytes = np.median(rounds, 0).tolist()
    return [
        DataResult("index", "sample index of 10M documents", sample_index, "CPU s", 1.0, at_most=True),
        DataResult("index", "document, sample and shuffle index", whole, "CPU s", 2.0, at_most=True),
        DataResult("index", "memory of the process", megabytes, "MB", 1000, at_most=True),
    ]


def _time_index() -> tuple[float, float, float]:
    """Return CPU seconds of the sample index and of all three indices, and the peak memory of the process in MB."""
    lengths = np.random.default_rng(0).integers(100, 2 * _DOCUMENT_TOKENS - 100, _INDEXED_DOCUMENTS)
    bounds = np.zeros(_INDEXED_DOCUMENTS + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    del lengths
    begun = cpu_seconds()
    documents = permutation(_INDEXED_DOCUMENTS, 1, 0, DOCUMENTS)
    permuted = cpu_seconds()
    starts = joined_starts(bounds, documents)
    joined = cpu_seconds()
    permutation(int(starts[-1] - 1) // _SEQ_LENGTH, 1, 0, SAMPLES)
    return joined - permuted, cpu_seconds() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def compare_with_megatron(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Count the tokens that are read incorrectly from Megatron's format, and compare our files with that format."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 300, 200).tolist()
    tokens = generator.integers(0, 65_536, sum(lengths)).tolist()
    ends = np.cumsum([0, *lengths]).tolist()
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    offsets = [2 * begin for begin in ends[:-1]]
    arrays = (("i", lengths), ("q", offsets), ("q", range(len(lengths) + 1)))
    idx = header + b"".join(struct.pack(f"<{len(values)}{letter}", *values) for letter, values in arrays)
    theirs, ours = benchmark.folder / "theirs", benchmark.folder / "ours"
    idx_path(theirs).write_bytes(idx)
    bin_path(theirs).write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    _write_dataset(ours, np.array(tokens, np.uint16), np.array(lengths, np.int32))
    read = IndexedDataset(theirs)
    documents = [token for number in range(len(read)) for token in read.document(number).tolist()]
    wrong = sum(a != b for a, b in zip(documents, tokens, strict=True))
    same = idx_path(ours).read_bytes() == idx and bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()
    return [
        DataResult("megatron", "tokens read incorrectly from Megatron's files", wrong, "", 0, at_most=True),
        DataResult("megatron", "our files equal Megatron's byte for byte", float(same), "", 1),
    ]


def detect_damage(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Change random bytes of .idx and truncate .bin, and count the data sets that are rejected."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 300, 200).astype(np.int32)
    prefix = benchmark.folder / "damaged"
    _write_dataset(prefix, generator.integers(0, 50_000, lengths.sum(), dtype=np.uint16), lengths)
    idx, tokens = idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()
    corrupted = 0
    for at in generator.choice(len(idx), 100, replace=False).tolist():
        byte = (idx[at] + int(generator.integers(1, 256))) % 256
        idx_path(prefix).write_bytes(idx[:at] + bytes([byte]) + idx[at + 1 :])
        corrupted += _is_rejected(prefix)
    idx_path(prefix).write_bytes(idx)
    cut = 0
    for size in generator.choice(len(tokens), 20, replace=False).tolist():
        bin_path(prefix).write_bytes(tokens[:size])
        cut += _is_rejected(prefix)
    return [
        DataResult("damage", "of 100 corrupted bytes of .idx detected", corrupted, "", 100),
        DataResult("damage", "of 20 truncations of .bin detected", cut, "", 20),
    ]


def _is_rejected(prefix: Path) -> bool:
    try:
        verify(prefix)
    except UserError:
        return True
    return False
