"""Streams beside the one that computes: work put on them, handles of it, and what waiting for it costs.

    compute   [ h_0 ]-.        [ h_1        ].-[ h_2 ...        the host only puts all of this into queues
    side               `->[ reduce of h_0 ]--'
                       ^ start: side waits for compute
                                            ^ wait: compute waits for side

Streams have a high priority: where both want a multiprocessor, the side gets it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work

HIGH_PRIORITY = -1
"""torch: lower numbers come first, 0 is what streams have otherwise."""


class WaitMeter:
    """How long the compute stream stood still in waits, by its own events.

    Where there is nothing to wait for, two events lie a microsecond or so apart. In a graph that is being captured
    nothing is timed, for events have no times there.
    """

    def __init__(self) -> None:
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def hold(self, wait: Callable[[], object]) -> None:
        """Calls `wait`, which makes the current stream wait for something, between two events."""
        if torch.cuda.is_current_stream_capturing():
            wait()
            return
        stream = torch.cuda.current_stream()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record(stream)
        wait()
        ended.record(stream)
        self._waits.append((began, ended))

    def reset(self) -> None:
        """Forgets the waits so far."""
        self._waits.clear()

    def seconds(self) -> float:
        """Sum of the waits since `reset`; blocks until the device is past the last of them."""
        if self._waits:
            self._waits[-1][1].synchronize()
        return sum(began.elapsed_time(ended) for began, ended in self._waits) * 1e-3


@dataclass(slots=True, eq=False)
class StreamWork:
    """The handle of something on a side stream."""

    tensor: Tensor
    """What is written there: kept from the allocator, which knows of the compute stream alone, until `wait`."""
    done: torch.cuda.Event
    meter: WaitMeter | None = None

    def wait(self) -> None:
        """Later work of the current stream runs after it; the host goes on at once."""
        if self.meter is None:
            self._wait()
        else:
            self.meter.hold(self._wait)

    def _wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


class SideStream:
    """A stream of high priority. What is put on it runs in order, and after what the current stream has so far."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)

    def put(self, launch: Callable[[], object], after: torch.cuda.Event | None = None) -> torch.cuda.Event:
        """Launches there.

        Args:
            after: what it waits for in place of the current stream.

        Returns:
            The event at its end.
        """
        self._stream.wait_event(after or torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._stream):
            launch()
        return self._stream.record_event()


@dataclass(slots=True, eq=False)
class _MeteredWork:
    work: Work
    meter: WaitMeter

    def wait(self) -> None:
        self.meter.hold(self.work.wait)


class MeteredGroup(CommGroup):
    """A group on GPUs that counts its collectives and times the waits for them.

    Attributes:
        collectives: launched since the counters were reset.
    """

    def __init__(self, group: CommGroup) -> None:
        """The ranks of `group`, over which everything goes."""
        super().__init__(group.ranks, group.rank, group.process_group)
        self.collectives = 0
        self._group = group
        self._meter = WaitMeter()

    @property
    def waited_seconds(self) -> float:
        """Time that the compute stream spent waiting since the counters were reset; blocks until it is known."""
        return self._meter.seconds()

    def reset_counters(self) -> None:
        """Sets `waited_seconds` and `collectives` to zero."""
        self._meter.reset()
        self.collectives = 0

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Starts summing `tensor` in place."""
        return self._metered(self._group.start_all_reduce(tensor))

    def start_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """Starts summing `tensor`, of which each rank gets its rows."""
        rows, work = self._group.start_reduce_scatter(tensor)
        return rows, self._metered(work)

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """Starts joining all ranks' rows."""
        whole, work = self._group.start_all_gather(tensor)
        return whole, self._metered(work)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces `tensor` in place and returns it."""
        if op == dist.ReduceOp.SUM and self.size > 1:
            self.collectives += 1
        self._meter.hold(lambda: self._group.all_reduce(tensor, op))
        return tensor

    def _metered(self, work: Work | None) -> Work | None:
        if work is None:
            return None
        self.collectives += 1
        return _MeteredWork(work, self._meter)
