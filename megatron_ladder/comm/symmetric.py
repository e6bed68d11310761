"""Tensor-parallel sums over memory that the GPUs of one machine share, on a side stream.

    compute   [ h_0 ]-.        [ h_1        ].-[ h_2 ...        the host only enqueues all of this
    side               `->[ reduce of h_0 ]--'
                       ^ start: side waits for compute
                                            ^ wait: compute waits for side

Side streams have a high priority: where both streams want a multiprocessor, the side stream gets it.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.agreement import raise_on_all_ranks
from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.errors import ErrorCollector, UserError

AllReduceChoice = Literal["auto", "nccl", "symmetric"]
HIGH_PRIORITY = -1
"""In torch, lower numbers come first; the default is 0."""
MOST_BYTES = 256 * 2**10
"""Largest one-shot all-reduce: on 8 GPUs, reading this much from each peer takes about 5 us, as long as the additional
steps of a ring. Switches that sum read less, but the limit has not been measured."""
ALIGNMENT = 16
"""Bytes; tensors need it for the kernel's widest loads, and the shared memory has it."""
SMALLEST_LOAD = 4
"""Bytes; the size of a tensor must be a multiple of the smallest load of torch's kernel."""
DTYPES = (torch.float32, torch.bfloat16)
"""Supported by torch's one-shot kernel."""


@dataclass(slots=True, eq=False)
class _StreamWork:
    """The handle of work on a side stream. The allocator does not know it, so the output is kept alive until `wait`."""

    tensor: Tensor
    done: torch.cuda.Event

    def wait(self) -> None:
        """Make later work of the current stream run after this work; the host continues at once."""
        torch.cuda.current_stream().wait_event(self.done)


class _SideStream:
    """A high-priority stream. Its work runs in order, and after the work that the current stream has so far."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)

    def put(self, launch: Callable[[], object]) -> torch.cuda.Event:
        """Call `launch` on the side stream, after the current stream, and return the event at its end."""
        self._stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._stream):
            launch()
        return self._stream.record_event()


class SymmetricMemoryGroup(CommGroup):
    """A tensor-parallel group whose small sums are one-shot all-reduces over NVLink; everything else uses NCCL.

    This is the strongest alternative to hiding the latency of small reduces. Each rank copies its tensor into memory
    that all GPUs of the machine map. One kernel reads and sums the tensors of all ranks, with one exchange of signals
    instead of the 2 (n - 1) steps of a ring. Each rank reads n - 1 whole tensors where a ring moves 2 (n - 1)/n of
    one, so large tensors use NCCL. Where NVSwitches support multicast, they sum the tensors, and each rank reads one.
    The kernel runs on a side stream, so wirings that overlap can overlap it too.
    """

    def __init__(self, group: CommGroup, device: torch.device, dtype: torch.dtype) -> None:
        """Map the memory of all ranks, for tensors in fp32 or bf16; a collective call.

        Raises UserError if there is no GPU, or the ranks cannot read each other's memory.
        """
        super().__init__(group.ranks, group.rank, group.process_group)
        check_peers(group.size, device, dtype)
        assert group.process_group is not None
        # Imported here because some builds of torch lack it.
        import torch.distributed._symmetric_memory as symmetric_memory

        self._name = group.process_group.group_name
        self._shared = symmetric_memory.empty(MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
        handle = symmetric_memory.rendezvous(self._shared, group.process_group)
        self._multicast = handle.multicast_ptr != 0
        self._side = _SideStream(device)

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Start summing `tensor` (contiguous, any shape) in place."""
        return self._start(tensor) if self._supports(tensor) else super().start_all_reduce(tensor)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `tensor` in place and return it."""
        if op != dist.ReduceOp.SUM or not self._supports(tensor):
            return super().all_reduce(tensor, op)
        # Also on the side stream, which may be using the shared memory.
        self._start(tensor).wait()
        return tensor

    def _start(self, tensor: Tensor) -> _StreamWork:
        # As in torch.distributed, the write is hidden from autograd and from the tensor's version counter.
        flat = tensor.data.view(-1)
        shared = self._shared[: flat.numel()]

        def reduce() -> None:
            shared.copy_(flat)
            ops = torch.ops.symm_mem
            one_shot = ops.multimem_one_shot_all_reduce_out if self._multicast else ops.one_shot_all_reduce_out
            one_shot(shared, "sum", self._name, flat)

        return _StreamWork(tensor, self._side.put(reduce))

    def _supports(self, tensor: Tensor) -> bool:
        fits = tensor.dtype == self._shared.dtype and 0 < tensor.numel() <= self._shared.numel()
        is_aligned = tensor.data_ptr() % ALIGNMENT == 0 and tensor.nbytes % SMALLEST_LOAD == 0
        return self.size > 1 and fits and tensor.is_contiguous() and is_aligned


def check_peers(size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError unless `size` ranks on GPUs of this machine can map each other's memory, and sum this dtype."""
    wanted = "--tp-all-reduce symmetric needs all ranks on GPUs of one machine that are joined by NVLink"
    instead = "use --tp-all-reduce nccl"
    if device.type != "cuda":
        raise UserError(f"{wanted}, found a {device.type.upper()}: {instead}")
    if dtype not in DTYPES:
        raise UserError(f"--tp-all-reduce symmetric sums fp32 and bf16, found {dtype}: {instead}")
    count = torch.cuda.device_count()
    if count < size:
        raise UserError(f"{wanted}, found {count} GPUs for {size} ranks: {instead}")
    peers = (peer for peer in range(size) if peer != device.index)
    apart = [peer for peer in peers if not torch.cuda.can_device_access_peer(device, peer)]
    if apart:
        raise UserError(f"{wanted}, but GPU {device.index} cannot read the memory of {apart}: {instead}")


def select_all_reduce(choice: AllReduceChoice, group: CommGroup, device: torch.device, dtype: torch.dtype) -> CommGroup:
    """Return the group with the chosen implementation of its small sums; a collective call.

    "auto" uses symmetric memory if every rank can. Raises UserError on every rank if "symmetric" is impossible.
    """
    if choice == "nccl" or group.size == 1:
        return group
    reasons = ErrorCollector()
    with reasons.collect():
        check_peers(group.size, device, dtype)
    hosts = group.broadcast_object(len(set(group.gather_objects(socket.gethostname()))))
    if hosts > 1:
        needs = f"--tp-all-reduce symmetric needs all ranks on one machine, found {hosts}"
        reasons.messages.append(f"{needs}: use --tp-all-reduce nccl")
    try:
        raise_on_all_ranks(group, reasons.messages)
    except UserError:
        if choice == "symmetric":
            raise
        return group
    return SymmetricMemoryGroup(group, device, dtype)
