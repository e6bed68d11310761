"""What a metered group counts."""

import pytest
import torch
from torch import Tensor

from ladder_lab.bench.metered import MeteredGroup
from megatron_ladder.comm.group import CommGroup
from tests.unit.comm import fake_cuda


class SlowGroup(CommGroup):
    """A group whose reduces take a millisecond from their launch."""

    def __init__(self, device: fake_cuda.Device) -> None:
        super().__init__(range(2), 0, None)
        self.device, self.end = device, 0.0

    def start_all_reduce(self, tensor: Tensor) -> "SlowGroup":
        self.end = self.device.compute.now + 1e-3
        return self

    def wait(self) -> None:
        self.device.compute.now = max(self.device.compute.now, self.end)


@pytest.mark.parametrize("captured", [False, True])
def test_waits_are_timed_on_the_device(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    device = fake_cuda.install(monkeypatch)
    group, device.capturing = MeteredGroup(SlowGroup(device)), captured
    for computing in (0.0, 6e-4, 2e-3):
        work = group.start_all_reduce(torch.ones(1))
        assert work is not None
        device.compute.now += computing
        work.wait()
    assert group.collectives == 3 and group.waited_seconds == pytest.approx(0.0 if captured else 1.4e-3)
    group.reset_counters()
    assert (group.collectives, group.waited_seconds) == (0, 0)
