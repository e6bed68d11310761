"""Chains alongside the computation: which stream waits for which."""

import pytest
import torch

from megatron_ladder.comm.side_queue import CudaSideQueue
from tests.unit.comm import fake_cuda


def test_chain_runs_after_earlier_work_and_alongside_later_work(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda.install(monkeypatch)
    queue = CudaSideQueue(torch.device("cuda"))
    assert device.streams[1].priority < 0, "it would wait for multiprocessors behind the product"
    device.compute.now = 5.0

    def chain() -> str:
        assert device.current is not device.compute
        assert device.current.now == 5.0, "its inputs might not be ready"
        device.current.now += 3.0
        return "read"

    assert queue.run(chain, uses=()) == "read"
    assert device.current is device.compute and device.compute.now == 5.0, "the computation does not wait"
    device.compute.now += 1.0
    queue.join()
    assert device.compute.now == 8.0


def test_longer_computation_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda.install(monkeypatch)
    queue = CudaSideQueue(torch.device("cuda"))
    queue.run(lambda: None, uses=())
    device.compute.now = 2.0
    queue.join()
    assert device.compute.now == 2.0
