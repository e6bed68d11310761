"""Time between two places of a program, by the processor that does its work."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks places, and says later how far apart they were."""

    def mark(self) -> Any:
        """Here."""

    def seconds(self, began: Any, ended: Any) -> float:
        """From one mark to a later one."""


class HostClock:
    """For work that is done when its call returns."""

    def mark(self) -> float:
        """Now, in seconds."""
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        """From one mark to a later one."""
        return ended - began


class DeviceClock:
    """For work that a GPU's current stream does after its call has returned."""

    def mark(self) -> torch.cuda.Event:
        """When the stream has come here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream())
        return event

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        """From one mark to a later one; blocks until the stream is there."""
        ended.synchronize()
        return began.elapsed_time(ended) * 1e-3


def clock_of(device: torch.device) -> Clock:
    """The clock of a device's work."""
    return DeviceClock() if device.type == "cuda" else HostClock()
