"""A group of which one process plays rank 0, on one GPU: it measures what the peers would cost it.

A rank computes its part whether or not its peers exist. Each collective is a kernel on a stream of high priority, as on
one NCCL communicator:

    compute   [ h_0 ][ h_1            ]  [ h_2 ...
    side           `-[ kernel for y_0 ]--'

The kernel takes multiprocessors, moves the message through memory, and ends when its time is over. There is one time
for each size of message, in device memory, so replays of a captured step can take other times. The time is given: it
does not grow while other kernels use the memory, and no peer writes to it. Results are wrong: a sum is this rank's
part, a gather repeats its rows, and an all-to-all returns them, with a copy before the kernel.

On a CPU, the kernel only counts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ladder_lab.link.link import Message, WireTimes
from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.comm.side_queue import CudaSideQueue

SIZES = 256
"""Most sizes of messages."""
BLOCK_NUMBERS = 32768
"""Numbers that a block of the kernel moves at once, 32 for each of its threads."""
ALIGNMENT = 16
"""Bytes of which the kernel needs a multiple as the address of a message."""
PIECE = 64
"""Bytes of which the kernel moves multiples."""

Occupy = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]
"""Launches the kernel: message, scratch memory [blocks, numbers], and in a slot of each the duration and a counter."""


def count_launch(message: Tensor, scratch: Tensor, durations: Tensor, launches: Tensor, slot: int) -> None:
    """Stand in for the kernel on a CPU."""
    launches[slot].add_(1)


class _Occupation(NamedTuple):
    """The handle of a collective, which keeps tensors until the current stream has waited; without an end on a CPU."""

    end: Any
    held: list[Tensor]

    def wait(self) -> None:
        if self.end is not None:
            torch.cuda.current_stream().wait_event(self.end)
        self.held.clear()


class OccupiedGroup(CommGroup):
    """Rank 0 of `size` ranks, whose collectives occupy the GPU.

    Attributes:
        launch_seconds: time that a collective takes beyond that of its kernel, by which the kernel's is shorter.
    """

    def __init__(self, size: int, device: torch.device, blocks: int, occupy: Occupy = count_launch) -> None:
        """`occupy` launches the kernel, each of whose blocks takes one multiprocessor."""
        super().__init__(range(size), 0, None)
        self.launch_seconds = 0.0
        self._occupy = occupy
        self._side = CudaSideQueue(device) if device.type == "cuda" else None
        self._times: WireTimes = lambda message: 0.0
        self._slots: dict[Message, int] = {}
        self._durations = torch.zeros(SIZES, dtype=torch.int64, device=device)
        self._launches = torch.zeros_like(self._durations)
        self._scratch = torch.empty(blocks, BLOCK_NUMBERS, dtype=torch.int32, device=device)

    @property
    def launches(self) -> dict[Message, int]:
        """The collectives so far, those of replays included."""
        return dict(zip(self._slots, self._launches.tolist(), strict=False))

    def set_blocks(self, blocks: int) -> None:
        """Change the multiprocessors of a collective; what was captured before must not be replayed any more."""
        self._scratch = self._scratch.new_empty(blocks, BLOCK_NUMBERS)

    def set_wire(self, times: WireTimes) -> None:
        """Change the wire, for captured collectives as well; none may be in flight."""
        self._times = times
        nanoseconds = [self._nanoseconds(message) for message in self._slots]
        self._durations[: len(nanoseconds)] = torch.tensor(nanoseconds, dtype=torch.int64)

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """Leave this rank's part in `tensor`."""
        return self._start(tensor, 1.0)

    def start_reduce_scatter(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work]:
        """Return this rank's rows of its part."""
        rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:]) if into is None else into
        is_part = rows.data_ptr() == tensor.data_ptr()
        copies = [] if is_part else [(rows.data, tensor.data[: len(rows)])]
        return rows, self._start(tensor, 0.5, copies)

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work]:
        """Repeat this rank's rows for every rank."""
        whole = tensor.new_empty(tensor.shape[0] * self.size, *tensor.shape[1:]) if into is None else into
        parts = whole.data.unflatten(0, (self.size, -1))
        is_part = whole.data_ptr() == tensor.data_ptr()
        return whole, self._start(whole, 0.5, [(parts[1:] if is_part else parts, tensor.data)])

    def start_all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Work]:
        """Return this rank's rows in place of those that would arrive, and their numbers in place of the others'.

        So as many arrive as were sent, as if all ranks' choices were the same.
        """
        into = torch.empty_like(rows)
        return into, self._start(into, 1.0, [(into.data, rows.data)], rows.nbytes // 2)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Leave this rank's part in `tensor` and return it."""
        self.start_all_reduce(tensor).wait()
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Repeat this rank's tensor along `dim`."""
        whole, work = self.start_all_gather(tensor.contiguous())
        work.wait()
        return whole if dim == 0 else torch.cat(whole.chunk(self.size), dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Return this rank's tensor, after half the time of an all-reduce."""
        self._start(tensor, 0.5).wait()
        return tensor

    def _start(
        self,
        message: Tensor,
        share: float,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
        reduced_bytes: int | None = None,
    ) -> Work:
        """Occupy the GPU for a share of the time of an all-reduce of the message, after copies (into, from).

        `reduced_bytes`: of the all-reduce, if they are not those of the message.
        """
        num_bytes = message.nbytes if reduced_bytes is None else reduced_bytes
        slot = self._slot(Message(num_bytes, self.size, share))

        def occupy() -> Any:
            for into, source in copies:
                into.copy_(source)
            self._occupy(_whole_pieces(message), self._scratch, self._durations, self._launches, slot)
            return None if self._side is None else torch.cuda.current_stream().record_event()

        if self._side is None:
            return _Occupation(occupy(), [])
        held = [message, *(tensor for pair in copies for tensor in pair)]
        return _Occupation(self._side.run(occupy, uses=None), held)

    def _slot(self, message: Message) -> int:
        if message not in self._slots:
            # A replay would set the duration again; runs before a capture have the same messages.
            captures = self._side is not None and torch.cuda.is_current_stream_capturing()
            assert not captures, f"{message} is new in a capture"
            slot = len(self._slots)
            self._durations[slot].fill_(self._nanoseconds(message))
            self._slots[message] = slot
        return self._slots[message]

    def _nanoseconds(self, message: Message) -> int:
        return max(0, round(1e9 * (self._times(message) - self.launch_seconds)))


def _whole_pieces(message: Tensor) -> Tensor:
    """Return what the kernel moves of a message, as int32; the rest has the right values as well."""
    num_bytes = message.nbytes // PIECE * PIECE if message.data_ptr() % ALIGNMENT == 0 else 0
    return message.data.view(-1).view(torch.uint8)[:num_bytes].view(torch.int32)
