"""Named time spans for a profiler, and a group whose collectives have names.

Modules are built with a `Span` and open it around the computation to be named; without a profiler it is `no_span`. A
profiled run names the collectives of its groups with `name_collectives`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work

Span = Callable[[str], AbstractContextManager[object]]
"""Name -> a context manager around the named computation, such as `torch.profiler.record_function`."""


no_span: Span = nullcontext
"""Does nothing: the span of a run without a profiler."""


def name_collectives(group: CommGroup, span: Span) -> CommGroup:
    """Return a group with the same ranks and collectives, whose collectives have names.

    An asynchronous collective has two spans, `all_reduce start` and `all_reduce wait`; a blocking one has one,
    `all_reduce`. All-to-alls are not waited for in the order of their starts, so these spans end in a number. One of
    integers, the numbers of rows to come, is a `counts all_to_all`. A group of one rank is returned as it is.
    """
    return group if group.size == 1 else _RecordedGroup(group, span)


class _RecordedWork(NamedTuple):
    work: Work
    name: str
    span: Span

    def wait(self) -> object:
        with self.span(self.name):
            return self.work.wait()


class _RecordedGroup(CommGroup):
    def __init__(self, group: CommGroup, span: Span) -> None:
        super().__init__(group.ranks, group.rank, group.process_group)
        self._group = group
        self._span = span
        self._exchanges = 0

    def _named(self, work: Work | None, operation: str, number: str = "") -> Work | None:
        return None if work is None else _RecordedWork(work, f"{operation} wait{number}", self._span)

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        with self._span("all_reduce start"):
            return self._named(self._group.start_all_reduce(tensor), "all_reduce")

    def start_reduce_scatter(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        with self._span("reduce_scatter start"):
            rows, work = self._group.start_reduce_scatter(tensor, into)
        return rows, self._named(work, "reduce_scatter")

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        with self._span("all_gather start"):
            whole, work = self._group.start_all_gather(tensor, into)
        return whole, self._named(work, "all_gather")

    def start_all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Work | None]:
        operation = "all_to_all" if rows.is_floating_point() else "counts all_to_all"
        self._exchanges += 1
        number = f" {self._exchanges}"
        with self._span(f"{operation} start{number}"):
            arriving, work = self._group.start_all_to_all(rows, sent, received)
        return arriving, self._named(work, operation, number)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        with self._span("all_reduce"):
            return self._group.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        with self._span("all_gather"):
            return self._group.all_gather(tensor, dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        with self._span("broadcast"):
            return self._group.broadcast(tensor, source)
