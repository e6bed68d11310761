"""Tensor-parallel sums over memory that the GPUs of one machine share, on a side stream.

    compute   [ h_0 ]-.        [ h_1        ].-[ h_2 ...        the host only enqueues all of this
    side               `->[ reduce of h_0 ]--'
                       ^ start: side waits for compute
                                            ^ wait: compute waits for side

Each rank copies its tensor into memory that all GPUs map. One kernel reads and sums the tensors of all ranks, with one
exchange of signals instead of the 2 (n - 1) steps of a ring. Each rank reads n - 1 whole tensors where a ring moves
2 (n - 1)/n of one, so large tensors use NCCL. Where NVSwitches support multicast, they sum, and each rank reads one.

The switches sum for each rank separately, in any order, so sums may differ between ranks by a rounding. A router that
finds two experts nearly equal might then choose different ones on different ranks, and the sum would mix the parts of
two experts. Models with experts therefore use the other kernel, which adds in rank order on every rank
(`load_and_reduce` in torch). NCCL sums each number once, and sends it to all ranks.
"""

import socket
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.agreement import raising_on_all_ranks
from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.comm.inflight import InFlight
from megatron_ladder.comm.side_queue import CudaSideQueue
from megatron_ladder.errors import Problem, UserError
from megatron_ladder.torch_private import has_nvlink, map_symmetric_memory

AllReduceChoice = Literal["auto", "nccl", "symmetric"]
MOST_BYTES = 256 * 2**10
"""Largest one-shot all-reduce: on 8 GPUs, reading it takes 5 us, as long as a ring's other steps (not measured)."""
ALIGNMENT, SMALLEST_LOAD = 16, 4
"""Bytes: the address that the kernel's widest loads need, which the shared memory has, and its smallest load."""


class SymmetricMemoryGroup(CommGroup):
    """A tensor-parallel group whose small sums are one-shot all-reduces over NVLink; everything else uses NCCL."""

    def __init__(self, group: CommGroup, device: torch.device, dtype: torch.dtype, equal_sums: bool) -> None:
        """Map the memory of all ranks, for tensors of this dtype; a collective call. Raises UserError if that fails.

        `equal_sums`: every rank needs bitwise the same sum.
        """
        super().__init__(group.ranks, group.rank, group.process_group)
        assert group.process_group is not None
        try:
            elements = MOST_BYTES // dtype.itemsize
            self._shared, multicast = map_symmetric_memory(elements, dtype, device, group.process_group)
        except (ImportError, RuntimeError) as error:
            raise _impossible(f"an error of torch: {error}") from error
        self._multicast = multicast and not equal_sums
        self._name, self._side = group.process_group.group_name, CudaSideQueue(device)

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Start summing `tensor` (contiguous, any shape) in place; the caller keeps it until the wait (`InFlight`)."""
        fits = tensor.dtype == self._shared.dtype and 0 < tensor.numel() <= self._shared.numel()
        is_aligned = tensor.data_ptr() % ALIGNMENT == 0 and tensor.nbytes % SMALLEST_LOAD == 0
        if not (fits and is_aligned and tensor.is_contiguous()):
            return super().start_all_reduce(tensor)
        # As in torch.distributed, the write is hidden from autograd and from the tensor's version counter.
        flat, shared = tensor.data.view(-1), self._shared[: tensor.numel()]

        def reduce() -> torch.cuda.Event:
            shared.copy_(flat)
            ops = torch.ops.symm_mem
            one_shot = ops.multimem_one_shot_all_reduce_out if self._multicast else ops.one_shot_all_reduce_out
            one_shot(shared, "sum", self._name, flat)
            return torch.cuda.current_stream().record_event()

        return self._side.run(reduce, uses=None)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `tensor` in place and return it; sums too use the side stream, because they share its memory."""
        if op != dist.ReduceOp.SUM:
            return super().all_reduce(tensor, op)
        return InFlight(tensor, self.start_all_reduce(tensor)).wait()


def check_peers(size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError unless `size` ranks on GPUs of this machine can map each other's memory, and sum this dtype.

    They must be joined by NVLink: ranks meet by compare-and-swap in each other's memory, which is not atomic over PCIe,
    so that torch's kernel might wait for ever.
    """
    if device.type != "cuda":
        raise _impossible(f"a {device.type.upper()}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise _impossible(f"{dtype} instead of fp32 or bf16")
    if (count := torch.cuda.device_count()) < size:
        raise _impossible(f"{count} GPUs for {size} ranks")
    peers = [peer for peer in range(size) if peer != device.index]
    if apart := [peer for peer in peers if not torch.cuda.can_device_access_peer(device, peer)]:
        raise _impossible(f"that GPU {device.index} cannot read the memory of {apart}")
    try:
        apart = [peer for peer in peers if not has_nvlink(device.index, peer)]
    except (AttributeError, RuntimeError) as error:
        raise _impossible(f"an error of torch: {error}") from error
    if apart:
        raise _impossible(f"no NVLink between GPU {device.index} and {apart}")


def _impossible(found: str) -> UserError:
    reason = "{} needs all ranks on GPUs of one machine that are joined by NVLink, found {found}"
    # Errors of CUDA have several lines.
    found = found.splitlines()[0]
    return UserError(Problem({"tp_all_reduce": "symmetric"}, reason, "use {} nccl", found=found))


def select_all_reduce(
    choice: AllReduceChoice, group: CommGroup, device: torch.device, dtype: torch.dtype, equal_sums: bool
) -> CommGroup:
    """Return the group with the chosen implementation of its small sums; a collective call.

    `equal_sums`: every rank needs bitwise the same sums, as for the router of a model with experts. "auto" uses
    symmetric memory if every rank can. Raises UserError on every rank if "symmetric" is impossible.
    """
    if choice == "nccl" or group.size == 1:
        return group
    try:
        if (hosts := group.broadcast_object(len(set(group.gather_objects(socket.gethostname()))))) > 1:
            raise _impossible(f"{hosts} machines")
        with raising_on_all_ranks(group):
            check_peers(group.size, device, dtype)
        with raising_on_all_ranks(group):
            return SymmetricMemoryGroup(group, device, dtype, equal_sums)
    except UserError:
        if choice == "symmetric":
            raise
    return group
