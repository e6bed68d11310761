"""Named time spans for a profiler, and a group whose collectives have names.

Modules are built with a `Span` and open it around the computation to be named; without a profiler it is `no_span`. A
profiled run uses `RecordedGroup`, which names collectives; other runs use the plain group.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work

Span = Callable[[str], AbstractContextManager[object]]
"""Name -> a context manager around the named computation, such as `torch.profiler.record_function`."""


def no_span(name: str) -> AbstractContextManager[object]:
    """Return a context manager that does nothing."""
    return nullcontext()


class _RecordedWork(NamedTuple):
    """A handle whose wait is named."""

    work: Work
    operation: str
    span: Span

    def wait(self) -> object:
        """Wait under the name `<operation> wait`."""
        with self.span(f"{self.operation} wait"):
            return self.work.wait()


class RecordedGroup(CommGroup):
    """Another group's ranks and collectives, with names.

    An asynchronous collective has two spans, `all_reduce start` and `all_reduce wait`; a blocking one has one,
    `all_reduce`.
    """

    def __init__(self, group: CommGroup, span: Span) -> None:
        super().__init__(group.ranks, group.rank, group.process_group)
        self._group = group
        self._span = span

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """See `CommGroup.start_all_reduce`."""
        if self.size == 1:
            return None
        with self._span("all_reduce start"):
            work = self._group.start_all_reduce(tensor)
        return None if work is None else _RecordedWork(work, "all_reduce", self._span)

    def start_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """See `CommGroup.start_reduce_scatter`."""
        if self.size == 1:
            return tensor, None
        with self._span("reduce_scatter start"):
            rows, work = self._group.start_reduce_scatter(tensor)
        return rows, None if work is None else _RecordedWork(work, "reduce_scatter", self._span)

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """See `CommGroup.start_all_gather`."""
        if self.size == 1:
            return tensor, None
        with self._span("all_gather start"):
            whole, work = self._group.start_all_gather(tensor)
        return whole, None if work is None else _RecordedWork(work, "all_gather", self._span)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """See `CommGroup.all_reduce`."""
        if self.size == 1:
            return tensor
        with self._span("all_reduce"):
            return self._group.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See `CommGroup.all_gather`."""
        if self.size == 1:
            return tensor
        with self._span("all_gather"):
            return self._group.all_gather(tensor, dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """See `CommGroup.broadcast`."""
        if self.size == 1:
            return tensor
        with self._span("broadcast"):
            return self._group.broadcast(tensor, source)
