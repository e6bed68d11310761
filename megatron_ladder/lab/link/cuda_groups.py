"""Groups on GPUs whose collectives run on side streams or are metered.

    compute   [ h_0 ]-.        [ h_1        ].-[ h_2 ...        the host only enqueues all of this
    side               `->[ reduce of h_0 ]--'
                       ^ start: side waits for compute
                                            ^ wait: compute waits for side

Side streams have a high priority: where both streams want a multiprocessor, the side stream gets it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.errors import UserError

HIGH_PRIORITY = -1
"""In torch, lower numbers come first; the default is 0."""
MOST_BYTES = 256 * 2**10
"""Largest one-shot all-reduce: on 8 GPUs, reading this much from each peer takes about 5 us, as long as the additional
steps of a ring."""
ALIGNMENT = 16
"""Bytes; tensors need it for the kernel's widest loads, and the shared memory has it."""
DTYPES = (torch.float32, torch.bfloat16)
"""Supported by torch's one-shot kernel."""


class WaitMeter:
    """Counts collectives, and measures how long the compute stream stalls in waits, with events on that stream.

    A wait for finished work measures a microsecond or so. During graph capture, events have no times.
    """

    def __init__(self) -> None:
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


@dataclass(slots=True, eq=False)
class StreamWork:
    """The handle of work on a side stream. The allocator does not know it, so the output is kept alive until `wait`."""

    tensor: Tensor
    done: torch.cuda.Event

    def wait(self) -> None:
        """Make later work of the current stream run after this work; the host continues at once."""
        torch.cuda.current_stream().wait_event(self.done)


@dataclass(slots=True, eq=False)
class MeteredWork:
    """The handle of work whose wait is timed."""

    work: Work
    meter: WaitMeter

    def wait(self) -> None:
        """Wait for the work."""
        self.meter.hold(self.work.wait)


class SideStream:
    """A high-priority stream. Its work runs in order, and after the work that the current stream has so far."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)

    def put(self, launch: Callable[[], object], after: torch.cuda.Event | None = None) -> torch.cuda.Event:
        """Call `launch` on the side stream, after an event or the current stream, and return the event at its end."""
        self._stream.wait_event(after or torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._stream):
            launch()
        return self._stream.record_event()


class MeteredGroup(WaitMeter, CommGroup):
    """A group on GPUs that counts its collectives and times the waits for them."""

    def __init__(self, group: CommGroup) -> None:
        WaitMeter.__init__(self)
        CommGroup.__init__(self, group.ranks, group.rank, group.process_group)
        self._group = group

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Start summing `tensor` in place."""
        return self._metered(self._group.start_all_reduce(tensor))

    def start_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """Start summing `tensor`; each rank gets its rows."""
        rows, work = self._group.start_reduce_scatter(tensor)
        return rows, self._metered(work)

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """Start joining all ranks' rows."""
        whole, work = self._group.start_all_gather(tensor)
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
        return MeteredWork(work, self)


class SymmetricMemoryGroup(CommGroup):
    """A tensor-parallel group whose small sums are one-shot all-reduces over NVLink; everything else uses NCCL.

    This is the strongest alternative to hiding the latency of small reduces. Each rank copies its tensor into memory
    that all GPUs of the machine map. One kernel reads and sums the tensors of all ranks, with one exchange of signals
    instead of the 2 (n - 1) steps of a ring. Each rank reads n - 1 whole tensors where a ring moves 2 (n - 1)/n of
    one, so large tensors use NCCL. The kernel runs on a side stream, so wirings that overlap can overlap it too.
    """

    def __init__(self, group: CommGroup, device: torch.device, dtype: torch.dtype) -> None:
        """Map the memory of all ranks, for tensors in fp32 or bf16; a collective call.

        Raises UserError if there is no GPU, or the ranks cannot read each other's memory.
        """
        super().__init__(group.ranks, group.rank, group.process_group)
        check_peers(group.size, device)
        assert dtype in DTYPES and group.process_group is not None
        # Imported here because some builds of torch lack it.
        import torch.distributed._symmetric_memory as symmetric_memory

        self._name = group.process_group.group_name
        self._shared = symmetric_memory.empty(MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self._shared, group.process_group)
        self._side = SideStream(device)

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

    def _start(self, tensor: Tensor) -> StreamWork:
        # As in torch.distributed, the write is hidden from autograd and from the tensor's version counter.
        flat = tensor.data.view(-1)
        shared = self._shared[: flat.numel()]

        def reduce() -> None:
            shared.copy_(flat)
            torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", self._name, flat)

        return StreamWork(tensor, self._side.put(reduce))

    def _supports(self, tensor: Tensor) -> bool:
        fits = tensor.dtype == self._shared.dtype and 0 < tensor.numel() <= self._shared.numel()
        return self.size > 1 and fits and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def check_peers(size: int, device: torch.device) -> None:
    """Raise UserError unless `size` ranks on GPUs of this machine can map each other's memory."""
    wanted = "--tp-all-reduce symmetric-memory needs all ranks on GPUs of one machine that are joined by NVLink"
    instead = "use --tp-all-reduce nccl"
    if device.type != "cuda":
        raise UserError(f"{wanted}, found a {device.type.upper()}: {instead}")
    count = torch.cuda.device_count()
    if count < size:
        raise UserError(f"{wanted}, found {count} GPUs for {size} ranks: {instead}")
    peers = (peer for peer in range(size) if peer != device.index)
    apart = [peer for peer in peers if not torch.cuda.can_device_access_peer(device, peer)]
    if apart:
        raise UserError(f"{wanted}, but GPU {device.index} cannot read the memory of {apart}: {instead}")
