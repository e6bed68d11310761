"""Fake CUDA streams and events with simulated clocks.

Work is put on streams in the order in which the host launches it, and depends on earlier work only, so its times are
known at once: `now` is the time in seconds at which a stream will have finished its work.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Event:
    def __init__(self, enable_timing: bool = False, external: bool = False) -> None:
        self.enable_timing, self.external = enable_timing, external
        self.time = 0.0

    def record(self, stream: "Stream") -> None:
        self.time = stream.now

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or torch.cuda.current_stream()).wait_event(self)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        assert self.enable_timing and end.enable_timing, "torch refuses events without times"
        return (end.time - self.time) * 1e3


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority
        self.now = 0.0

    def wait_event(self, event: Event) -> None:
        self.now = max(self.now, event.time)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Device:
    """A stand-in for `torch.cuda`; `streams[0]` computes."""

    def __init__(self) -> None:
        self.streams = [Stream()]
        self.current = self.streams[0]
        self.capturing = False

    @property
    def compute(self) -> Stream:
        return self.streams[0]

    def new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        self.streams.append(Stream(device, priority))
        return self.streams[-1]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Replace torch's streams and events."""
    fake = Device()
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", fake.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    return fake
