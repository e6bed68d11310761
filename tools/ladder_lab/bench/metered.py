"""A group on GPUs whose collectives are metered."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work


@dataclass(slots=True, eq=False)
class _MeteredWork:
    """The handle of work whose wait is timed."""

    work: Work
    group: "MeteredGroup"

    def wait(self) -> None:
        """Wait for the work."""
        self.group.hold(self.work.wait)


class MeteredGroup(CommGroup):
    """Counts collectives, and measures how long the compute stream stalls in waits, with events on that stream.

    A wait for finished work measures a microsecond or so. During graph capture, events have no times.
    """

    def __init__(self, group: CommGroup) -> None:
        super().__init__(group.ranks, group.rank, group.process_group)
        self._group = group
        self.collectives = 0
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def hold(self, wait: Callable[[], object]) -> None:
        """Call `wait`, which makes the current stream wait for something, between two events."""
        if torch.cuda.is_current_stream_capturing():
            wait()
            return
        stream = torch.cuda.current_stream()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record(stream)
        wait()
        ended.record(stream)
        self._waits.append((began, ended))

    def reset_counters(self) -> None:
        """Set `waited_seconds` and `collectives` to zero."""
        self._waits.clear()
        self.collectives = 0

    @property
    def waited_seconds(self) -> float:
        """Time that the compute stream has waited since the counters were reset; blocks until it is known."""
        if self._waits:
            self._waits[-1][1].synchronize()
        return sum(began.elapsed_time(ended) for began, ended in self._waits) * 1e-3

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Start summing `tensor` in place."""
        return self._metered(self._group.start_all_reduce(tensor))

    def start_reduce_scatter(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        """Start summing `tensor`; each rank gets its rows."""
        rows, work = self._group.start_reduce_scatter(tensor, into)
        return rows, self._metered(work)

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        """Start joining all ranks' rows."""
        whole, work = self._group.start_all_gather(tensor, into)
        return whole, self._metered(work)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `tensor` in place and return it."""
        if op == dist.ReduceOp.SUM and self.size > 1:
            self.collectives += 1
        self.hold(lambda: self._group.all_reduce(tensor, op))
        return tensor

    def _metered(self, work: Work | None) -> Work | None:
        if work is None:
            return None
        self.collectives += 1
        return _MeteredWork(work, self)
