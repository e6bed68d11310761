"""The emulated link on a GPU, with fake streams: timings by the rule and by the step-time model."""

import random
from collections import deque
from typing import Any

import pytest
import torch

from ladder_lab.cost.links import SubBlockTime, WireModel, forward_seconds
from ladder_lab.link.cuda_link import PIPELINED_LANES, CudaLink
from ladder_lab.link.link import LinkSpec
from megatron_ladder.comm.group import Work
from tests.unit.comm import fake_cuda

CPU = torch.device("cpu")
MICRO = 1e-6


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.Device:
    return fake_cuda.install(monkeypatch)


def make_link(device: fake_cuda.Device, alpha: float, *, serial: bool, size: int = 8) -> CudaLink:
    return CudaLink(size, LinkSpec(alpha, 0.0, serial), CPU, sms=16, kernels=fake_cuda.Kernels(device))


def launch(link: CudaLink) -> Work:
    work = link.start_all_reduce(torch.ones(4))
    assert work is not None
    return work


@pytest.mark.parametrize("serial", [True, False])
def test_ends_follow_the_rule(device: fake_cuda.Device, serial: bool) -> None:
    """Launch at random times and compare each end with the rule, computed by hand."""
    drawn, link = random.Random(serial), make_link(device, 0.0, serial=serial)
    wire_free = 0.0
    for _ in range(PIPELINED_LANES):
        device.compute.now += drawn.uniform(0, 5e-5)
        alpha = drawn.uniform(0, 1e-4)
        link.set_wire(alpha, 0.0)
        begin = max(device.compute.now, wire_free) if serial else device.compute.now
        wire_free = begin + alpha
        work: Any = launch(link)
        assert work.work.done.time == pytest.approx(wire_free, abs=3e-9)
    assert link.collectives == PIPELINED_LANES


@pytest.mark.parametrize("serial", [True, False])
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("ratio", [0.4, 1.0, 2.5])
def test_a_pass_takes_the_time_of_the_step_time_model(
    device: fake_cuda.Device, serial: bool, staleness: int, ratio: float
) -> None:
    """Compare the stack's walk over the link with `lab/cost/links.py`, which knows nothing of streams."""
    compute = [(20 + 7 * (number % 3)) * MICRO for number in range(12)]
    link = make_link(device, ratio * 25 * MICRO, serial=serial)
    pending: deque[Work] = deque()
    for seconds in compute:
        while len(pending) > staleness:
            pending.popleft().wait()
        device.compute.now += seconds
        pending.append(launch(link))
    for work in pending:
        work.wait()
    steps = [SubBlockTime(seconds, ratio * 25 * MICRO, tuple(range(1, staleness + 1))) for seconds in compute]
    assert device.compute.now == pytest.approx(forward_seconds(steps, WireModel(serial)), rel=1e-4)
    assert link.waited_seconds == pytest.approx(device.compute.now - sum(compute), abs=1e-8)


def test_the_wire_carries_the_bytes_of_a_ring_for_the_time_of_the_spec(device: fake_cuda.Device) -> None:
    kernels = fake_cuda.Kernels(device)
    link = CudaLink(8, LinkSpec(5 * MICRO, 1e-9, serial=True), CPU, sms=12, kernels=kernels)
    tensor = torch.arange(2000, dtype=torch.bfloat16)
    assert link.all_reduce(tensor) is tensor and tensor.equal(torch.arange(2000, dtype=torch.bfloat16))
    assert kernels.carried == [{"bytes": 7000, "wire_ns": 9000, "sms": 12}]
    assert device.compute.now == pytest.approx(9 * MICRO)
