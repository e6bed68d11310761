"""Fake CUDA streams and events with simulated clocks.

Work is put on streams in the order in which the host launches it, and depends on earlier work only, so its times are
known at once: `now` is the time in seconds at which a stream will have finished its work.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch


@dataclass
class Event:
    time: float

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self)  # type: ignore[arg-type]


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority
        self.now = 0.0

    def wait_event(self, event: Event) -> None:
        self.now = max(self.now, event.time)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        return Event(self.now)


class Device:
    """A stand-in for `torch.cuda`; `streams[0]` computes."""

    def __init__(self) -> None:
        self.streams = [Stream()]
        self.current = self.compute = self.streams[0]

    def new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        self.streams.append(Stream(device, priority))
        return self.streams[-1]

    def use(self, stream: Stream) -> "_Use":
        return _Use(self, stream)


@dataclass
class _Use:
    """A use of a block's memory; without an end it has no effect when the memory is freed, as in torch."""

    device: Device
    stream: Stream

    def __enter__(self) -> None:
        self.before, self.device.current = self.device.current, self.stream

    def __exit__(self, *_: object) -> None:
        self.device.current = self.before


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Replace torch's streams."""
    fake = Device()
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.current)
    return fake
