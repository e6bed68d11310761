"""A set of ranks and the collectives among them: the only file that starts one.

Layers get a `CommGroup` and never a global; in a group of one rank every collective does nothing. Another
interconnect (one that is recorded, or emulated) is another class with the same methods.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """The handle of a collective in flight."""

    def wait(self) -> object:
        """Returns when the result is there (on CUDA: when later work of the current stream will see it)."""


class CommGroup:
    """Ranks that reduce with one another, in the order of `ranks`.

    Attributes:
        rank: this process's place in `ranks`.
        size: how many there are.
        ranks: their global ranks.
        process_group: torch's group; None without torch.distributed, when this rank is alone.
    """

    def __init__(self, ranks: Sequence[int], rank: int, process_group: dist.ProcessGroup | None) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.process_group = process_group

    @staticmethod
    def alone() -> "CommGroup":
        """The group of one process, which needs no torch.distributed."""
        return CommGroup([0], 0, None)

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Starts summing `tensor` (contiguous, any shape) in place; None when there is nobody to wait for."""
        if self.size == 1:
            return None
        return dist.all_reduce(tensor, group=self.process_group, async_op=True)

    def start_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """Starts summing `tensor` [n, ...] (contiguous), of which each rank gets n / size rows, in rank order.

        Returns:
            The rows' place, and the handle; the tensor itself and None when this rank is alone.
        """
        if self.size == 1:
            return tensor, None
        rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        # gloo copies the sum there when it is waited for, of which autograd must not hear.
        return rows, dist.reduce_scatter_single(rows.data, tensor, group=self.process_group, async_op=True)

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """Starts joining all ranks' `tensor` [n, ...] (contiguous) along the first dimension, in rank order.

        Returns:
            The place of the [size x n, ...], and the handle; the tensor itself and None when this rank is alone.
        """
        if self.size == 1:
            return tensor, None
        whole = tensor.new_empty(tensor.shape[0] * self.size, *tensor.shape[1:])
        return whole, dist.all_gather_single(whole.data, tensor, group=self.process_group, async_op=True)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces `tensor` in place and returns it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks (equal shapes) joined along `dim`, in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self.process_group)
        return torch.cat(parts, dim)

    def over_gloo(self, timeout: timedelta) -> "CommGroup":
        """The same ranks, with messages of their own, for which a rank sleeps while it waits, on every device.

        All processes there are must call it, and be in this group.
        """
        if self.size == 1:
            return self
        process_group = dist.new_group(list(self.ranks), timeout=timeout, backend="gloo")
        return CommGroup(self.ranks, self.rank, process_group)

    def gather_objects(self, value: object) -> list[Any]:
        """Small picklable values of all ranks, in rank order, on the group's rank 0; empty on the others."""
        if self.size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, gathered, dst=self.ranks[0], group=self.process_group)
        return gathered or []

    def broadcast_object(self, value: object) -> Any:
        """The small picklable value of the group's rank 0."""
        if self.size == 1:
            return value
        carried = [value]
        dist.broadcast_object_list(carried, src=self.ranks[0], group=self.process_group)
        return carried[0]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrites `tensor` with that of the group's rank `source` and returns it."""
        if self.size > 1:
            dist.broadcast(tensor, self.ranks[source], group=self.process_group)
        return tensor

    def barrier(self) -> None:
        """Returns when every rank of the group is here."""
        if self.size > 1:
            dist.barrier(group=self.process_group)
