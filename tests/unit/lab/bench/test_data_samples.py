"""The benchmark's rows about data sets, on little data."""

from pathlib import Path

import pytest

from megatron_ladder.lab.bench import data_samples
from megatron_ladder.lab.bench.data_table import DataBenchmark


@pytest.fixture
def benchmark_of(tmp_path: Path) -> DataBenchmark:
    return DataBenchmark(tmp_path, rounds=4, megabytes=1, report=lambda line: None)


def test_rows_about_files_are_met(benchmark_of: DataBenchmark) -> None:
    rows = [*data_samples.compare_with_megatron(benchmark_of), *data_samples.detect_damage(benchmark_of)]
    assert [row.figure for row in rows] == [0, 1, 100, 20] and all(row.met for row in rows)


def test_an_undamaged_data_set_is_not_rejected(benchmark_of: DataBenchmark) -> None:
    data_samples.compare_with_megatron(benchmark_of)
    assert not data_samples._is_rejected(benchmark_of.folder / "ours")


def test_speeds(benchmark_of: DataBenchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_samples, "_TOKENS", 500_000)
    monkeypatch.setattr(data_samples, "_READ_SAMPLES", 128)
    monkeypatch.setattr(data_samples, "_INDEXED_DOCUMENTS", 5_000)
    short, one, bare, ratio = data_samples.read_samples(benchmark_of)
    assert None not in (short.figure, one.figure, bare.figure, ratio.figure)
    assert [row.target for row in (short, one, bare, ratio)] == [50_000, None, None, 0.5]
    assert all(figure > 0 for figure in data_samples._time_index())
