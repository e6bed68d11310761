"""The end of captures that fail, by torch's own context manager around a stand-in for the driver and the allocators."""

from typing import Any

import pytest
import torch

from megatron_ladder.comm import capture
from megatron_ladder.comm.capture import PeakMemory, capturing
from megatron_ladder.errors import UserError
from megatron_ladder.generate.graph import CudaStepGraph
from tests.unit.comm import fake_cuda

POOL: Any = (0, 1)


class Driver:
    """The state of torch's allocator of device memory, and graphs that change it as `CUDAGraph.cpp` does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: list[Any] = []
        self.pools: list[Any] = []
        self.invalid = False
        """Whether the driver has found an operation that a capture must not contain."""
        self.device = fake_cuda.install(monkeypatch)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", lambda device, pool: self.end(pool))
        monkeypatch.setattr(torch.cuda.memory, "_cuda_releasePool", lambda device, pool: self.pools.remove(pool))
        monkeypatch.setattr(capture, "_FAILED", [])

    def end(self, pool: Any) -> None:
        if pool not in self.captures:
            raise RuntimeError("not currently recording to mempool_id")
        self.captures.remove(pool)

    def is_clean(self) -> bool:
        return self.device.current is self.device.compute and not self.captures and not self.pools


class Graph:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.ended = False

    def capture_begin(self, pool: Any, capture_error_mode: str, **_: Any) -> None:
        assert self.driver.device.current is not self.driver.device.compute
        self.driver.captures.append(pool)
        self.driver.pools.append(pool)

    def capture_end(self) -> None:
        if self.driver.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.driver.end(POOL)
        self.ended = True

    def reset(self) -> None:
        if self.ended:
            self.driver.pools.remove(POOL)


@pytest.mark.parametrize("invalid", [False, True])
@pytest.mark.parametrize("step_fails", [False, True])
def test_a_failed_capture_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, invalid: bool, step_fails: bool
) -> None:
    driver = Driver(monkeypatch)
    driver.invalid = invalid
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def run() -> None:
        with capturing(graph, stream, POOL):
            assert driver.device.current is stream
            if step_fails:
                raise ValueError("the host reads")

    if not invalid and not step_fails:
        run()
        assert not driver.captures and driver.pools == [POOL]
        graph.reset()
    else:
        with pytest.raises(ValueError if step_fails else RuntimeError, match="host reads" if step_fails else "failed"):
            run()
        assert len(capture._FAILED) == invalid
    assert driver.is_clean()


def test_decoding_reports_a_step_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    graph = CudaStepGraph()

    def step() -> torch.Tensor:
        driver.invalid = driver.device.current is not driver.device.compute and bool(driver.captures)
        if driver.invalid:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(())

    with pytest.raises(UserError, match="a step cannot be captured: operation not permitted .*--no-cuda-graph"):
        graph.capture(step)
    assert driver.is_clean()


@pytest.mark.parametrize(
    ("rests", "problem"), [(0, ""), (2, "it needs 14.0 GB of GPU memory, and 13.0 GB can be freed")]
)
def test_a_capture_needs_what_the_passes_of_each_pool_need(
    monkeypatch: pytest.MonkeyPatch, rests: int, problem: str
) -> None:
    """A forward pass of 6 GB that leaves 4, and a backward pass that needs 3 more, take 7.

    Two such pairs run in the first pool, one after the other, and another one in the second.
    """
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated * 10**9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: most * 10**9)
    memory = PeakMemory(torch.device("cuda", 0))
    allocated = 10
    for key in ("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1), ("backward", 2):
        with memory.measuring(key[1]):
            most = allocated + (6 if key[0] == "forward" else 3)
            allocated += 4 if key[0] == "forward" else -4
    numbers = {"allocated_bytes.all.current": 10, "reserved_bytes.all.current": 24}
    stats = {name: number * 10**9 for name, number in (numbers | {"inactive_split_bytes.all.current": rests}).items()}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 80 * 10**9))
    assert memory.capture_problem(lambda key: key % 2) == problem
