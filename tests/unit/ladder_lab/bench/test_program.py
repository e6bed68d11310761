"""A benchmark's interconnect, and whole benchmarks with fake CUDA streams and kernels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from ladder_lab.bench import interconnect, program, workloads
from ladder_lab.bench.comparison import WiringComparison
from ladder_lab.bench.interconnect import Interconnect, start_ranks
from ladder_lab.bench.options import BenchmarkOptions, Case
from ladder_lab.bench.results import BenchmarkRow, results_table
from ladder_lab.bench.sizes import SIZES
from ladder_lab.bench.workloads import Workload
from ladder_lab.link.cuda_link import CudaLink
from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.errors import UserError
from tests.unit.comm import fake_cuda

CPU = torch.device("cpu")
TINY = replace(
    SIZES["small-train"],
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    head_dim=8,
    num_key_value_heads=2,
    vocab_size=512,
)
ALONE = RankInfo(0, 1, 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.Device:
    return fake_cuda.install(monkeypatch)


def emulated(device: fake_cuda.Device, monkeypatch: pytest.MonkeyPatch, **given: Any) -> BenchmarkOptions:
    """Return options of an emulated group of four, with fake kernels and computation on the CPU."""
    monkeypatch.setitem(SIZES, "tiny", TINY)
    real = CudaLink

    def link_of(size: int, spec: Any, device_: torch.device, sms: int) -> CudaLink:
        return real(size, spec, device_, sms=sms, kernels=fake_cuda.Kernels(device))

    monkeypatch.setattr(interconnect, "CudaLink", link_of)
    return BenchmarkOptions(device="cuda", emulated_tp=4, sizes=("tiny",), sequence=8, tokens=1, rounds=4, **given)


def measured(case: Case, options: BenchmarkOptions, text: str) -> tuple[str, dict[str, BenchmarkRow]]:
    """Return the heading and the rows by wiring. Without `start_ranks`, because the model computes on the CPU here."""
    comparison = WiringComparison(options, TINY, ALONE, CPU)
    workload = Workload(case, options.batch, options.sequence, options.tokens, options.cuda_graph)
    prediction = comparison.calibrate(workload)
    heading = program._heading(comparison, workload, "tiny", prediction)
    return heading, {row.wiring: row for row in program._rows(comparison, workload, "tiny", prediction, text)}


@pytest.mark.parametrize(("case", "reduces"), [("decode", 2), ("train", 4)])
def test_a_share_of_a_larger_group_runs_alone(
    device: fake_cuda.Device, monkeypatch: pytest.MonkeyPatch, case: Case, reduces: int
) -> None:
    """The fake clock advances only in waits, so every reduce is exposed."""
    alpha = 1e-4
    synchronised: list[Interconnect] = []
    monkeypatch.setattr(Interconnect, "synchronize", lambda self: synchronised.append(self))
    options = emulated(device, monkeypatch, wirings=("standard", "ladder"))
    heading, rows = measured(case, options, "100us")
    assert "rank 0 of 4 emulated ones (its results are wrong numbers)" in heading
    assert list(rows) == ["standard", "ladder", "no-comm"]
    # Standard and the bound for the calibration, then all three, each in one warm-up round and four that count.
    assert len(synchronised) == (2 + 3) * (1 + 4)
    assert rows["no-comm"].exposed_seconds_per_layer == 0
    assert rows["standard"].exposed_seconds_per_layer >= reduces * alpha
    assert rows["ladder"].exposed_seconds_per_layer == pytest.approx(rows["standard"].exposed_seconds_per_layer)
    assert rows["standard"].interconnect == "emulated serial wire and ranks"


class ReplayedStep:
    """A `StepGraph` for a CPU that repeats the step."""

    made: ClassVar[list["ReplayedStep"]] = []

    def __init__(self) -> None:
        self.replays, self.closed = 0, False
        self.made.append(self)

    def capture(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.step, self.result = step, step()
        return self.result

    def replay(self) -> None:
        assert not self.closed
        self.replays += 1
        self.result.copy_(self.step())

    def close(self) -> None:
        self.closed = True


def test_decoding_is_timed_by_replays(device: fake_cuda.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "CudaStepGraph", ReplayedStep)
    options = emulated(device, monkeypatch, wirings=("standard", "ladder"), cuda_graph=True)
    _, rows = measured("decode", options, "100us")
    assert {row.exposed_seconds_per_layer for row in rows.values()} == {None}
    assert "|  | " in results_table([rows["standard"]])
    # Standard and its bound for the calibration, then all three; one warm-up round and four that count.
    assert [graph.replays for graph in ReplayedStep.made] == [1 + 4] * 5
    assert all(graph.closed for graph in ReplayedStep.made)


def test_missing_hardware_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: torch finds no GPU here"):
        start_ranks(BenchmarkOptions(device="cuda", emulated_tp=8), ALONE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    options = BenchmarkOptions(device="cuda", tp_all_reduce="symmetric")
    with pytest.raises(UserError, match="cannot read the memory"):
        start_ranks(options, RankInfo(0, 2, 0))
    with pytest.raises(UserError, match="rank 2 is process 3 of its host, which has 2 GPUs: lower --tp"):
        start_ranks(replace(options, tp=4), RankInfo(2, 4, 2))
    with pytest.raises(UserError, match="--tp 2 needs 2 processes, but the launcher started 4"):
        start_ranks(options, RankInfo(0, 4, 0))
