"""A one-shot all-reduce over NVLink: the rival of every scheme that hides the latency of small reduces.

Each rank copies its tensor into memory that all GPUs of the machine map, and one kernel reads those of all ranks and
sums them, without the steps of a ring: one exchange of signals in place of 2 (n - 1). Each rank reads n - 1 whole
tensors where a ring moves 2 (n - 1)/n of one, so large tensors go by NCCL.

It runs on a side stream, so that wirings which overlap do so with it as well.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.errors import UserError
from megatron_ladder.lab.link.cuda_streams import SideStream, StreamWork

MOST_BYTES = 256 * 2**10
"""Of a tensor that is reduced in one shot: on 8 GPUs reading so much of each peer takes about 5 us, as long as the
steps that a ring has more."""
ALIGNMENT = 16
"""Bytes; of tensors for the kernel's widest loads, to which the shared memory is aligned as well."""
DTYPES = (torch.float32, torch.bfloat16)
"""That torch's kernel sums."""


class SymmetricMemoryGroup(CommGroup):
    """A tensor-parallel group on the GPUs of one machine whose small sums are one-shot; all else is NCCL's."""

    def __init__(self, group: CommGroup, device: torch.device, dtype: torch.dtype) -> None:
        """A collective call: the ranks map one another's memory.

        Args:
            group: the ranks, on the GPUs of one machine.
            dtype: of the tensors that are reduced in one shot: fp32 or bf16.

        Raises:
            UserError: there is no GPU, or the ranks cannot read one another's memory.
        """
        super().__init__(group.ranks, group.rank, group.process_group)
        check_peers(group.size, device)
        assert dtype in DTYPES and group.process_group is not None
        # Not above: torch builds without it exist.
        import torch.distributed._symmetric_memory as symmetric_memory

        self._name = group.process_group.group_name
        self._shared = symmetric_memory.empty(MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self._shared, group.process_group)
        self._side = SideStream(device)

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Starts summing `tensor` (contiguous, any shape) in place."""
        if self.size == 1 or not self._takes(tensor):
            return super().start_all_reduce(tensor)
        return self._start(tensor)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces `tensor` in place and returns it."""
        if op != dist.ReduceOp.SUM or self.size == 1 or not self._takes(tensor):
            return super().all_reduce(tensor, op)
        # On the side stream too, where the shared memory may be in use.
        self._start(tensor).wait()
        return tensor

    def _start(self, tensor: Tensor) -> StreamWork:
        return StreamWork(tensor, self._side.put(lambda: self._one_shot(tensor)))

    def _takes(self, tensor: Tensor) -> bool:
        return (
            tensor.dtype == self._shared.dtype
            and 0 < tensor.numel() <= self._shared.numel()
            and tensor.is_contiguous()
            and tensor.data_ptr() % ALIGNMENT == 0
        )

    def _one_shot(self, tensor: Tensor) -> None:
        # As with torch.distributed, neither autograd nor the tensor's version hears of the write.
        flat = tensor.data.view(-1)
        shared = self._shared[: flat.numel()]
        shared.copy_(flat)
        torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", self._name, flat)


def check_peers(size: int, device: torch.device) -> None:
    """Whether `size` ranks on this machine can map one another's memory.

    Raises:
        UserError: the device is no GPU, or this machine has fewer than `size` or some that cannot read one another.
    """
    wanted = "--tp-all-reduce symmetric-memory needs all ranks on GPUs of one machine that are joined by NVLink"
    instead = "use --tp-all-reduce nccl"
    if device.type != "cuda":
        raise UserError(f"{wanted}, found a {device.type.upper()}: {instead}")
    count = torch.cuda.device_count()
    if count < size:
        raise UserError(f"{wanted}, found {count} GPUs for {size} ranks: {instead}")
    others = [peer for peer in range(size) if peer != device.index]
    apart = [peer for peer in others if not torch.cuda.can_device_access_peer(device, peer)]
    if apart:
        raise UserError(f"{wanted}, but GPU {device.index} cannot read the memory of {apart}: {instead}")
