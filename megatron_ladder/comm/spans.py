"""Names for stretches of time, as a profiler shows them, and a group whose collectives have names.

Who computes is built with a `Span` and opens one around what deserves a name. Without a profiler that is `no_span`.
Collectives are named by the group: a run that is profiled gets `RecordedGroup`, any other one the plain group.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work

Span = Callable[[str], AbstractContextManager[object]]
"""Name -> what stands around the named computation: `torch.profiler.record_function`, for one."""


def no_span(name: str) -> AbstractContextManager[object]:
    """Names nothing."""
    return nullcontext()


class RecordedWork(NamedTuple):
    """The handle of a collective whose wait has a name."""

    work: Work
    operation: str
    span: Span

    def wait(self) -> object:
        """Waits under the name `<operation> wait`."""
        with self.span(f"{self.operation} wait"):
            return self.work.wait()


class RecordedGroup(CommGroup):
    """Another group's ranks and collectives, with names.

    A collective in flight has two, `all_reduce start` and `all_reduce wait`; one that is waited for at once has one,
    `all_reduce`.
    """

    def __init__(self, group: CommGroup, span: Span) -> None:
        super().__init__(group.ranks, group.rank, group.process_group)
        self._group = group
        self._span = span

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """As `CommGroup.start_all_reduce`."""
        if self.size == 1:
            return None
        with self._span("all_reduce start"):
            work = self._group.start_all_reduce(tensor)
        return None if work is None else RecordedWork(work, "all_reduce", self._span)

    def start_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """As `CommGroup.start_reduce_scatter`."""
        if self.size == 1:
            return tensor, None
        with self._span("reduce_scatter start"):
            rows, work = self._group.start_reduce_scatter(tensor)
        return rows, None if work is None else RecordedWork(work, "reduce_scatter", self._span)

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """As `CommGroup.start_all_gather`."""
        if self.size == 1:
            return tensor, None
        with self._span("all_gather start"):
            whole, work = self._group.start_all_gather(tensor)
        return whole, None if work is None else RecordedWork(work, "all_gather", self._span)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """As `CommGroup.all_reduce`."""
        if self.size == 1:
            return tensor
        with self._span("all_reduce"):
            return self._group.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """As `CommGroup.all_gather`."""
        if self.size == 1:
            return tensor
        with self._span("all_gather"):
            return self._group.all_gather(tensor, dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """As `CommGroup.broadcast`."""
        if self.size == 1:
            return tensor
        with self._span("broadcast"):
            return self._group.broadcast(tensor, source)
