"""A benchmark's interconnect, and whole benchmarks with fake CUDA streams and kernels."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megatron_ladder.comm.launch import RankInfo
from megatron_ladder.errors import UserError
from megatron_ladder.lab.bench import program, workloads
from megatron_ladder.lab.bench.options import BenchmarkOptions, Case
from megatron_ladder.lab.bench.program import _Benchmark, _Interconnect, _make_interconnect, _start_ranks
from megatron_ladder.lab.bench.results import results_table
from megatron_ladder.lab.bench.sizes import SIZES
from megatron_ladder.lab.cost.machines import PRESETS
from megatron_ladder.lab.link.cuda_link import CudaLink
from megatron_ladder.lab.link.link import NoCommGroup
from tests.unit.comm import fake_cuda

CPU = torch.device("cpu")
TINY = replace(
    SIZES["small-train"], num_layers=2, hidden_size=64, ffn_hidden_size=128, head_dim=8, num_key_value_heads=2,
    vocab_size=512,
)  # fmt: skip
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

    monkeypatch.setattr(program, "CudaLink", link_of)
    return BenchmarkOptions(device="cuda", emulated_tp=4, sizes=("tiny",), sequence=8, tokens=1, rounds=4, **given)


def test_one_gpu_is_rank_0_of_an_emulated_group(device: fake_cuda.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    interconnect = _make_interconnect(emulated(device, monkeypatch, comm_sms=12), TINY, CPU)
    assert isinstance(interconnect.wire, CudaLink) and interconnect.mesh.tensor is interconnect.wire
    assert (interconnect.wire.size, interconnect.wire.rank, interconnect.wire.sms) == (4, 0, 12)
    # Two key and value heads on four ranks: two replicas each.
    replica = interconnect.mesh.kv_replica
    assert isinstance(replica, NoCommGroup) and replica.size == 2
    assert "emulated" in interconnect.name and interconnect.dtype == torch.bfloat16
    interconnect.set_alpha(2e-3)
    assert interconnect.wire.spec.seconds(10**6) == 2e-3


@pytest.mark.parametrize(("case", "reduces"), [("decode", 2), ("prefill", 2), ("train", 4)])
def test_a_share_of_a_larger_group_runs_alone(
    device: fake_cuda.Device, monkeypatch: pytest.MonkeyPatch, case: Case, reduces: int
) -> None:
    """The fake clock advances only in waits, so every reduce is exposed."""
    alpha = 1e-4
    synchronised: list[_Interconnect] = []
    monkeypatch.setattr(_Interconnect, "synchronize", lambda self: synchronised.append(self))
    options = emulated(device, monkeypatch, wirings=("standard", "ladder"))
    # Without `_start_ranks`, because the model computes on the CPU here.
    benchmark = _Benchmark(case, options, "tiny", ALONE, CPU)
    rows = {row.wiring: row for row in benchmark.rows(benchmark.calibrate(), "100us")}
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
    benchmark = _Benchmark("decode", options, "tiny", ALONE, CPU)
    prediction = benchmark.calibrate()
    rows = {row.wiring: row for row in benchmark.rows(prediction, "100us")}
    # As in a benchmark without graphs, in which the wire counts the reduces of each layer and the embedding.
    assert prediction.always_waiting == 1
    assert {row.exposed_seconds_per_layer for row in rows.values()} == {None}
    assert "|  | " in results_table([rows["standard"]])
    # Standard and its bound for the calibration, then all three; one warm-up round and four that count.
    assert [graph.replays for graph in ReplayedStep.made] == [1 + 4] * 5
    assert all(graph.closed for graph in ReplayedStep.made)


def test_every_line_names_emulated_parts(device: fake_cuda.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    options = emulated(device, monkeypatch, wirings=("standard", "desync-2"))
    benchmark = _Benchmark("decode", options, "tiny", ALONE, CPU)
    prediction = benchmark.calibrate()
    rows = benchmark.rows(prediction, "nvlink")
    assert rows[0].alpha_seconds == PRESETS["nvlink"].seconds(64 * 2, 4), "a bf16 vector on four ranks"
    heading, table = program._heading(benchmark, prediction), results_table(rows)
    assert "rank 0 of 4 emulated ones (its results are wrong numbers)" in heading
    assert all("emulated" in line for line in table.splitlines()) and len(table.splitlines()) == 3
    required = {
        "case", "wiring", "alpha_seconds", "median_seconds", "ratio_to_standard", "predicted_ratio", "spread",
    }  # fmt: skip
    assert required <= set(vars(rows[0]))


def test_synchronize_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    nothing: Any = None
    for device in (CPU, torch.device("cuda", 3)):
        _Interconnect("", nothing, nothing, nothing, device, torch.bfloat16).synchronize()
    assert waited == [torch.device("cuda", 3)]


def test_missing_hardware_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: torch finds no GPU here"):
        _start_ranks(BenchmarkOptions(device="cuda", emulated_tp=8), ALONE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    options = BenchmarkOptions(device="cuda", tp_all_reduce="symmetric")
    with pytest.raises(UserError, match="cannot read the memory"):
        _start_ranks(options, RankInfo(0, 2, 0))
    with pytest.raises(UserError, match="found 2 GPUs for 4 processes: lower --tp, or give --emulated-tp"):
        _start_ranks(options, RankInfo(0, 4, 0))


def test_real_groups_are_bounded_and_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    mesh = SimpleNamespace(tensor=NoCommGroup(CudaLinkless(2)))
    monkeypatch.setattr(program.ProcessMesh, "build", lambda tp, **options: asked.append(options) or mesh)
    interconnect: _Interconnect = _make_interconnect(BenchmarkOptions(device="cuda", comm_sms=8), TINY, CPU)
    assert asked == [{"kv_replicas": 1, "tp_comm_max_ctas": 8}]
    assert interconnect.name == "nccl" and isinstance(interconnect.wire, program.MeteredGroup)


class CudaLinkless(NoCommGroup):
    """A group with a size and nothing else."""

    def __init__(self, size: int) -> None:
        self.ranks, self.rank, self.size, self.process_group = tuple(range(size)), 0, size, None
