"""Rows of the data benchmark about indexed data sets: reading samples, building their order, damaged files."""

import multiprocessing
import resource
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ladder.data.indexed import IndexedDataset, IndexedDatasetWriter, bin_path, idx_path
from megatron_ladder.data.inspect import verify
from megatron_ladder.data.samples import (
    DOCUMENTS,
    SAMPLES,
    SampleRows,
    SampleSource,
    joined_starts,
    permutation,
)
from megatron_ladder.data.sidecar import Sidecar, write_sidecar
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench.data_table import DataBenchmark, DataResult, cpu_seconds, measure_cpu

SEQ_LENGTH = 2048
BATCH = 64
"""Samples that are read at a time."""
READ_SAMPLES = 16_384
"""In a round."""
TOKENS = 50_000_000
DOCUMENT_TOKENS = 1_100
INDEXED_DOCUMENTS = 10_000_000


def read_samples(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Samples a CPU second into batches that are there already, beside bare copies out of the mapped file."""
    tokens = np.random.default_rng(0).integers(0, 50_000, TOKENS, dtype=np.uint16)
    several = TOKENS // DOCUMENT_TOKENS
    lengths = {"short": np.full(several, DOCUMENT_TOKENS), "one": np.array([several * DOCUMENT_TOKENS])}
    sources = {}
    for name, of_documents in lengths.items():
        prefix = benchmark.folder / name
        write_dataset(prefix, tokens[: several * DOCUMENT_TOKENS], of_documents.astype(np.int32))
        sources[name] = SampleSource(IndexedDataset(prefix), range(len(of_documents)), SEQ_LENGTH, 1, shuffle=True)
    out = SampleRows(np.empty((BATCH, SEQ_LENGTH + 1), np.uint16), None)
    places = [np.arange(begin, begin + BATCH) for begin in range(0, READ_SAMPLES, BATCH)]

    def read(source: SampleSource) -> None:
        for numbers in places:
            source.samples(numbers, out)

    mapped = np.asarray(np.memmap(bin_path(benchmark.folder / "one"), np.uint16, "r"))
    begins = (permutation(len(sources["one"]), 2, 0, SAMPLES)[:READ_SAMPLES] * SEQ_LENGTH).tolist()

    def copy() -> None:
        for place, begin in enumerate(begins):
            out.tokens[place % BATCH] = mapped[begin : begin + SEQ_LENGTH + 1]

    ways: dict[str, Callable[[], object]] = {
        "short": lambda: read(sources["short"]),
        "one": lambda: read(sources["one"]),
        "copy": copy,
    }
    times = measure_cpu(benchmark, ways)
    rates = {name: np.array([READ_SAMPLES / seconds for seconds in times.seconds[name]]) for name in ways}
    ratios = rates["one"] / rates["copy"]
    return [
        _result("samples", "of shuffled documents of 1,100 tokens", rates["short"], "samples/s", 50_000),
        _result("samples", "in one document", rates["one"], "samples/s", None),
        _result("samples", "bare copies", rates["copy"], "samples/s", None),
        _result("samples", "in one document / bare copies", ratios, "", 0.5),
    ]


def _result(row: str, case: str, figures: NDArray[np.float64], unit: str, target: float | None) -> DataResult:
    low, middle, high = np.quantile(figures, [0.25, 0.5, 0.75]).tolist()
    return DataResult(row, case, middle, unit, target, spread=high - low)


def write_dataset(prefix: Path, tokens: NDArray[np.uint16], lengths: NDArray[np.int32]) -> None:
    """A data set with its sidecar and checksums."""
    with IndexedDatasetWriter(prefix, tokens.dtype) as writer:
        writer.add_documents(tokens, lengths)
        sums = writer.publish()
    sidecar = Sidecar(
        "NullTokenizer", "0" * 64, 1 << 16, 0, False, int(tokens.max()), len(lengths), len(tokens),
        bin_checksum=sums.bin, idx_checksum=sums.idx,
    )  # fmt: skip
    write_sidecar(prefix, sidecar)


def build_index(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """The order of an epoch of 10 million documents, in a process of its own, whose memory is told."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        rounds = np.array([pool.apply(time_index) for _ in range(benchmark.rounds)])
    sample_index, whole, megabytes = np.median(rounds, 0).tolist()
    return [
        DataResult("index", "sample index of 10M documents", sample_index, "CPU s", 1.0, at_most=True),
        DataResult("index", "document, sample and shuffle index", whole, "CPU s", 2.0, at_most=True),
        DataResult("index", "memory of the process", megabytes, "MB", 1000, at_most=True),
    ]


def time_index() -> tuple[float, float, float]:
    """CPU seconds of the sample index, of all three indices, and the peak of the process's memory in MB."""
    lengths = np.random.default_rng(0).integers(100, 2 * DOCUMENT_TOKENS - 100, INDEXED_DOCUMENTS)
    bounds = np.zeros(INDEXED_DOCUMENTS + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    del lengths
    begun = cpu_seconds()
    documents = permutation(INDEXED_DOCUMENTS, 1, 0, DOCUMENTS)
    permuted = cpu_seconds()
    starts = joined_starts(bounds, documents)
    joined = cpu_seconds()
    permutation(int(starts[-1] - 1) // SEQ_LENGTH, 1, 0, SAMPLES)
    return joined - permuted, cpu_seconds() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def compatible_bytes(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Tokens that differ when a data set as Megatron's writer leaves it is read, and when ours is read as it does."""
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
    write_dataset(ours, np.array(tokens, np.uint16), np.array(lengths, np.int32))
    read = IndexedDataset(theirs)
    documents = [token for number in range(len(read)) for token in read.document(number).tolist()]
    wrong = sum(a != b for a, b in zip(documents, tokens, strict=True))
    same = idx_path(ours).read_bytes() == idx and bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()
    return [
        DataResult("megatron", "tokens read wrong of Megatron's files", wrong, "", 0, at_most=True),
        DataResult("megatron", "our files are byte for byte Megatron's", float(same), "", 1),
    ]


def refuse_damage(benchmark: DataBenchmark) -> Sequence[DataResult]:
    """Random bytes of .idx changed, and .bin cut short: how many are refused, when opened or by --verify."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 300, 200).astype(np.int32)
    prefix = benchmark.folder / "damaged"
    write_dataset(prefix, generator.integers(0, 50_000, lengths.sum(), dtype=np.uint16), lengths)
    idx, tokens = idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()
    corrupted = 0
    for at in generator.choice(len(idx), 100, replace=False).tolist():
        byte = (idx[at] + int(generator.integers(1, 256))) % 256
        idx_path(prefix).write_bytes(idx[:at] + bytes([byte]) + idx[at + 1 :])
        corrupted += is_refused(prefix)
    idx_path(prefix).write_bytes(idx)
    cut = 0
    for size in generator.choice(len(tokens), 20, replace=False).tolist():
        bin_path(prefix).write_bytes(tokens[:size])
        cut += is_refused(prefix)
    return [
        DataResult("damage", "of 100 corrupted bytes of .idx refused", corrupted, "", 100),
        DataResult("damage", "of 20 truncations of .bin refused", cut, "", 20),
    ]


def is_refused(prefix: Path) -> bool:
    """Whether a data set is refused by a message."""
    try:
        verify(prefix)
    except UserError:
        return True
    return False
