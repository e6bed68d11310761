"""A set of ranks and its collectives, which no other file starts, and copies from the host to the device.

Layers receive a `CommGroup` and use no global group. In a group of one rank every collective does nothing. A recorded
or emulated interconnect is another class with the same methods.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.torch_private import process_groups

_ASYNCHRONOUS = dist.AllreduceOptions()
_ASYNCHRONOUS.asyncOp = True
# torch before 2.13 has them under the other names only, which newer versions deprecate.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """The handle of a collective in flight."""

    def wait(self) -> object:
        """Return when the result is available (on CUDA: to later work of the current stream)."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the host does not wait if it has to be copied from the CPU.

    A GPU copies from page-locked memory by itself. From any other memory, the host copies.
    """
    return tensor if tensor.device == device else tensor.pin_memory().to(device, non_blocking=True)


class CommGroup:
    """Ranks that communicate with each other, in the order of `ranks`.

    Attributes:
        rank: this process's index in `ranks`.
        size: number of ranks.
        ranks: global ranks.
        process_group: torch's group; None for one rank without torch.distributed.
        descending: torch's group of messages to lower ranks: `process_group` if it is not given.
        awaited: global rank of the other end of the transfer that this rank waits for, if any.
        transferred: number of transfers that this rank has waited for.
    """

    awaited: int | None = None
    transferred = 0

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        process_group: dist.ProcessGroup | None,
        descending: dist.ProcessGroup | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.process_group = process_group
        self.descending = descending or process_group

    @staticmethod
    def alone() -> "CommGroup":
        """Return the group of one process, which needs no torch.distributed."""
        return CommGroup([0], 0, None)

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Start to sum `tensor` (contiguous, any shape) in place; return None in a group of one rank."""
        if self.process_group is None or self.size == 1:
            return None
        # Not dist.all_reduce, whose checks take the host longer than the launch.
        return self.process_group.allreduce([tensor], _ASYNCHRONOUS)

    def start_reduce_scatter(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        """Start to sum `tensor` [n, ...] (contiguous); each rank gets n / size rows of the sum, in rank order.

        Return the buffer of the rows (`into` if it is given, which may be this rank's rows of `tensor`), and the
        handle; in a group of one rank, the tensor itself and None.
        """
        if self.size == 1:
            return tensor, None
        rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:]) if into is None else into
        # gloo copies the sum there during the wait, which autograd must not see.
        return rows, _reduce_scatter_single(rows.data, tensor, group=self.process_group, async_op=True)

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        """Start to concatenate all ranks' `tensor` [n, ...] (contiguous) along the first dimension, in rank order.

        Return the buffer [size x n, ...] (`into` if it is given, of which `tensor` may be this rank's part), and the
        handle; in a group of one rank, the tensor itself and None.
        """
        if self.size == 1:
            return tensor, None
        whole = tensor.new_empty(tensor.shape[0] * self.size, *tensor.shape[1:]) if into is None else into
        return whole, _all_gather_single(whole.data, tensor, group=self.process_group, async_op=True)

    def start_all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Work | None]:
        """Start to send `sent[i]` of the `rows` [n, ...] (contiguous) to rank i, in rank order; numbers may be 0.

        Return the buffer of the rows that arrive, `received[i]` from rank i, in rank order, and the handle; in a group
        of one rank, the rows themselves and None.
        """
        if self.size == 1:
            return rows, None
        into = rows.new_empty(sum(received), *rows.shape[1:])
        splits = list(received), list(sent)
        return into, dist.all_to_all_single(into.data, rows, *splits, group=self.process_group, async_op=True)

    def start_send(self, tensor: Tensor, target: int) -> Work:
        """Start to send `tensor` (contiguous, any shape) to the group's rank `target`.

        The messages from one rank to another must start in the same order on both. With a separate group for messages
        to lower ranks, they may start in any order among those in the other direction; otherwise in the same, too.
        """
        process_group = self.process_group if self.rank < target else self.descending
        return _Transfer(self, target, dist.isend(tensor, group=process_group, group_dst=target))

    def start_receive(self, into: Tensor, source: int) -> Work:
        """Start to receive the tensor that the group's rank `source` sends."""
        process_group = self.process_group if source < self.rank else self.descending
        return _Transfer(self, source, dist.irecv(into, group=process_group, group_src=source))

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `tensor` in place and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.process_group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the tensors of all ranks (equal shapes) along `dim`, in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self.process_group)
        return torch.cat(parts, dim)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send the flat tensor `parts[i]` to rank i, and return the one that each rank sent, of `sizes[i]` elements."""
        if self.size == 1:
            return list(parts)
        sent = torch.cat(list(parts))
        received = sent.new_empty(sum(sizes))
        lengths = [part.numel() for part in parts]
        dist.all_to_all_single(received, sent, list(sizes), lengths, group=self.process_group)
        return list(received.split(list(sizes)))

    def over_gloo(self, timeout: timedelta) -> "CommGroup":
        """Return a gloo group of the same ranks; a rank that waits in it sleeps, on every device.

        All ranks of this group must call this method, and other groups' methods in the same order.
        """
        if self.size == 1:
            return self
        # torch names such a group after its ranks and the number of groups that each of them has joined, which differs
        # between pipeline stages.
        joined = len(process_groups())
        for _ in range(self.broadcast_object(max(self.gather_objects(joined), default=0)) - joined):
            dist.new_group([self.ranks[self.rank]], timeout, backend="gloo", use_local_synchronization=True)
        process_group = dist.new_group(list(self.ranks), timeout, backend="gloo", use_local_synchronization=True)
        return CommGroup(self.ranks, self.rank, process_group)

    def gather_objects(self, value: object) -> list[Any]:
        """Return small picklable values of all ranks, in rank order, on the group's rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, gathered, dst=self.ranks[0], group=self.process_group)
        return gathered or []

    def broadcast_object(self, value: object) -> Any:
        """Return the small picklable value of the group's rank 0."""
        if self.size == 1:
            return value
        carried = [value]
        dist.broadcast_object_list(carried, src=self.ranks[0], group=self.process_group)
        return carried[0]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` with that of the group's rank `source` and return it."""
        if self.size > 1:
            dist.broadcast(tensor, self.ranks[source], group=self.process_group)
        return tensor

    def barrier(self) -> None:
        """Return when every rank of the group has called this."""
        if self.size > 1:
            dist.barrier(group=self.process_group)


class _Transfer:
    """A message in flight. torch records no messages of gloo, so the group records with whom it waits for one."""

    def __init__(self, group: CommGroup, peer: int, work: Work | None) -> None:
        assert work is not None
        self._group, self._peer, self._work = group, group.ranks[peer], work

    def wait(self) -> None:
        self._group.awaited = self._peer
        self._work.wait()
        self._group.awaited = None
        self._group.transferred += 1
