"""An interconnect of chosen latency and bandwidth, for benchmarks and tests on one machine.

The reduce is real: every rank copies its tensor into shared memory and sums those of all ranks in rank order, so all
get the same bits. No thread works in the background, as none does where a network adapter moves the bytes; gloo's
threads would take turns with the products on the same core, which costs the standard wiring most and fakes a gain.
Only the completion is emulated: collective k is done at

    end(k) = max(latest rank's launch of k, end(k - 1)) + alpha + bytes * beta         serial wire
    end(k) =     latest rank's launch of k              + alpha + bytes * beta         pipelined wire

in launch order, whatever the order of the waits. A reduce-scatter and an all-gather are the two halves of an all-reduce
and take half of its time each. `start_all_reduce` returns as soon as the copy is made; `wait` sums
and then holds until end(k), asleep except for the last moment:

    rank 0   [copy][ computes                ][ wait: sums | sleeps  | spins ]
    rank 1             [copy][ computes                     ]   :            :
    wire                     ~~~~~~~~~~ alpha + bytes * beta ~~~~~~~~~~~~~~~~^ end

What the copy and the sum cost is the processors' own and not on the wire; the sum hides under the hold.

`cuda_link.py` is its twin on a GPU.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.errors import LostPeerError
from megatron_ladder.lab.link.shared_memory import Arena, Board, Record

FIRST_TENSOR_BYTES = 1 << 16
"""Size that an arena is made for before any tensor is known."""
POLL_SECONDS = 20e-6
"""Sleep between two looks at a peer that is late."""


@dataclass(frozen=True)
class LinkSpec:
    """What an emulated wire does to one all-reduce."""

    alpha_seconds: float
    """Time of an all-reduce of no bytes."""
    seconds_per_byte: float
    """Further time for each byte of one rank's tensor."""
    serial: bool
    """Whether a collective begins only when the one launched before it has ended, as on one NCCL communicator."""

    def __post_init__(self) -> None:
        """Raises ValueError if a time is negative or not finite."""
        for name in ("alpha_seconds", "seconds_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value}: expected a time of 0 or more")

    def seconds(self, num_bytes: int) -> float:
        """Time on the wire of an all-reduce of a tensor of `num_bytes`."""
        return self.alpha_seconds + num_bytes * self.seconds_per_byte


@dataclass(slots=True, eq=False)
class LinkWork:
    """The handle of an all-reduce on an emulated link."""

    link: "EmulatedLink"
    number: int
    combine: Callable[[Sequence[Tensor]], object]
    """Makes the result of what the ranks contributed."""
    parts: tuple[Tensor, ...]
    """What each rank contributed, flat, in rank order; empty once the result is made."""
    wire_ns: int
    end_ns: int = 0
    """When the wire is done with it; known once all ranks have launched it."""

    def wait(self) -> None:
        """Returns when the sum is in the tensor and the wire is done.

        Raises:
            LostPeerError: another rank has not launched this collective within the link's timeout.
        """
        self.link.complete(self)


class EmulatedLink(CommGroup):
    """A group whose sums go over an emulated wire; reduces by another operator and all else are the real group's.

    One thread of a process uses it. Every rank makes the same calls of it in the same order, `wait` excepted. A
    tensor on it is on the CPU, contiguous, of any dtype, shape and size. Room for larger ones is made when the first
    is launched, which blocks until every rank has launched it. Any number may be in flight: where there is no more
    room, a launch first makes the sums of the oldest ones, which blocks until every rank has launched those; their
    ends are held all the same.

    Attributes:
        spec: what the wire does to collectives launched from now on.
        waited_seconds: time spent in `wait` since the counters were reset: exposed communication, the sum and what
            peers were late included.
        collectives: sums launched since the counters were reset.
    """

    def __init__(
        self, group: CommGroup, spec: LinkSpec, *, spin_seconds: float = 200e-6, timeout_seconds: float = 600.0
    ) -> None:
        """A collective call: the ranks agree on shared memory through `group`.

        Args:
            group: the ranks, all on one machine.
            spin_seconds: how long before its end a wait stops sleeping and watches the clock, and how long it
                watches for a late peer before it sleeps: more than a sleep may be late (a tenth of a millisecond on
                Linux), and little enough for a rank on the same core.
            timeout_seconds: after which a peer that does not launch is taken for lost.

        Raises:
            UserError: the ranks are not on one machine, it has too little shared memory, or it is no x86.
        """
        super().__init__(group.ranks, group.rank, group.process_group)
        self.spec = spec
        self.waited_seconds = 0.0
        self.collectives = 0
        self._spin_ns = round(spin_seconds * 1e9)
        self._timeout_ns = round(timeout_seconds * 1e9)
        self._last_number = 0
        self._wire_free_ns = 0
        self._without_end: deque[LinkWork] = deque()
        self._without_sum: deque[LinkWork] = deque()
        self._board = self._arena = None
        if self.size > 1:
            self._board = Board(group)
            self._arena = Arena(group, FIRST_TENSOR_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set_wire(self, alpha_seconds: float, seconds_per_byte: float) -> None:
        """Changes the wire for collectives launched from now on; every rank must do so at the same place."""
        self.spec = replace(self.spec, alpha_seconds=alpha_seconds, seconds_per_byte=seconds_per_byte)

    def reset_counters(self) -> None:
        """Sets `waited_seconds` and `collectives` to zero."""
        self.waited_seconds, self.collectives = 0.0, 0

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Starts summing `tensor` in place; None when this rank is alone.

        Sums are made in the tensor's dtype, in rank order.

        Raises:
            ValueError: the tensor is not on the CPU or not contiguous.
            LostPeerError: there is no more room and a peer does not launch what lies there.
        """
        if self.size == 1:
            return None
        # As with torch.distributed, neither autograd nor the tensor's version hears of the write.
        data = tensor.data
        return self._launch(tensor, lambda parts: _add_up(data.view(-1), parts), self.spec.seconds(_bytes_of(tensor)))

    def start_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """As `start_all_reduce`, each rank getting its rows of the sum, in half of the time."""
        if self.size == 1:
            return tensor, None
        rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])

        def add_up_own(parts: Sequence[Tensor]) -> None:
            _add_up(rows.data.view(-1), [part.chunk(self.size)[self.rank] for part in parts])

        return rows, self._launch(tensor, add_up_own, self.spec.seconds(_bytes_of(tensor)) / 2)

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """Joins all ranks' rows in half of the time that an all-reduce of the result takes."""
        if self.size == 1:
            return tensor, None
        whole = tensor.new_empty(tensor.shape[0] * self.size, *tensor.shape[1:])

        def join(parts: Sequence[Tensor]) -> None:
            torch.cat(list(parts), out=whole.data.view(-1))

        return whole, self._launch(tensor, join, self.spec.seconds(_bytes_of(whole)) / 2)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sums `tensor` in place over the wire and returns it; another operator takes the real group."""
        if op != dist.ReduceOp.SUM:
            return super().all_reduce(tensor, op)
        work = self.start_all_reduce(tensor)
        if work is not None:
            work.wait()
        return tensor

    def complete(self, work: LinkWork) -> None:
        """What a handle's `wait` does."""
        began = time.monotonic_ns()
        if work.parts:
            self._sum(work)
        hold_until(work.end_ns, self._spin_ns)
        self.waited_seconds += (time.monotonic_ns() - began) * 1e-9

    def close(self) -> None:
        """Gives the shared memory back. Not collective; what is in flight can no more be waited for."""
        self._without_end.clear()
        self._without_sum.clear()
        if self._arena is not None:
            self._arena.close()
        if self._board is not None:
            self._board.close()
        self._board = self._arena = None

    def _launch(self, tensor: Tensor, combine: Callable[[Sequence[Tensor]], object], seconds: float) -> LinkWork:
        """Shows `tensor` to the other ranks, and takes the wire for so long."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"expected a contiguous tensor on the CPU, found {tensor.stride()} on {tensor.device}")
        board, arena = self._memory()
        num_bytes = _bytes_of(tensor)
        if not arena.holds(num_bytes):
            arena = self._grow(num_bytes)
        number = self._last_number + 1
        offset, in_the_way = arena.claim(number, num_bytes)
        if in_the_way:
            self._make_room(in_the_way)
        parts = arena.views(offset, num_bytes, tensor.dtype)
        parts[self.rank].copy_(tensor.data.view(-1))
        wire_ns = round(seconds * 1e9)
        board.publish(number, Record(time.monotonic_ns(), num_bytes, wire_ns))
        self._last_number = number
        self.collectives += 1
        work = LinkWork(self, number, combine, parts, wire_ns)
        self._without_end.append(work)
        self._without_sum.append(work)
        return work

    def _memory(self) -> tuple[Board, Arena]:
        if self._board is None or self._arena is None:
            raise RuntimeError("this emulated link is closed")
        return self._board, self._arena

    def _sum(self, work: LinkWork) -> None:
        """Sums what all ranks contributed, as soon as they have, and finds the end of this and earlier works."""
        board, _ = self._memory()
        self._await_peers(board.launched, work.number, "launched")
        while self._without_end and self._without_end[0].number <= work.number:
            self._find_end(board, self._without_end.popleft())
        work.combine(work.parts)
        work.parts = ()
        last = 0
        while self._without_sum and not self._without_sum[0].parts:
            last = self._without_sum.popleft().number
        if last:
            board.publish_delivered(last)

    def _find_end(self, board: Board, work: LinkWork) -> None:
        """The rule at the top of this file. Works come in launch order."""
        records = board.records(work.number)
        if len({(record.num_bytes, record.wire_ns) for record in records}) > 1:
            told = "; ".join(f"rank {r}: {rec.num_bytes} bytes, {rec.wire_ns} ns" for r, rec in enumerate(records))
            raise RuntimeError(f"the ranks are out of step at all-reduce {work.number} of an emulated link: {told}")
        begin = max(record.launched_ns for record in records)
        if self.spec.serial:
            begin = max(begin, self._wire_free_ns)
        work.end_ns = self._wire_free_ns = begin + work.wire_ns

    def _make_room(self, number: int) -> None:
        """Returns when no rank reads the collectives up to `number` any more."""
        board, _ = self._memory()
        while self._without_sum and self._without_sum[0].number <= number:
            self._sum(self._without_sum[0])
        self._await_peers(board.delivered, number, "summed")

    def _grow(self, num_bytes: int) -> Arena:
        """Replaces the arena by one that holds tensors of `num_bytes`; all ranks come here at the same launch."""
        _, arena = self._memory()
        while self._without_sum:
            self._sum(self._without_sum[0])
        # Peers may still read the old arena: each rank unmaps only its own view of it.
        arena.close()
        # Doubling keeps tensors that grow step by step from coming here at each step.
        self._arena = Arena(self, 1 << (num_bytes - 1).bit_length())
        return self._arena

    def _await_peers(self, counters: Callable[[], list[int]], number: int, done: str) -> None:
        """Returns when every rank's counter is at least `number`."""
        began = time.monotonic_ns()
        while min(counters()) < number:
            waited = time.monotonic_ns() - began
            if waited > self._timeout_ns:
                late = [rank for rank, counter in zip(self.ranks, counters(), strict=True) if counter < number]
                raise LostPeerError(
                    f"ranks {late} have not {done} all-reduce {number} of an emulated link "
                    f"within {self._timeout_ns * 1e-9:g} s"
                )
            if waited > self._spin_ns:
                time.sleep(POLL_SECONDS)


class NoCommGroup(CommGroup):
    """A group whose reduces do nothing: each rank keeps its own part, so the results are wrong.

    For benchmarks alone: no interconnect lets a step take less time than this.
    """

    def __init__(self, group: CommGroup) -> None:
        """The ranks of `group`, over which all but reduces still go."""
        super().__init__(group.ranks, group.rank, group.process_group)

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """None: there is nothing to wait for."""
        return None

    def start_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """This rank's rows of its own part."""
        return tensor.chunk(self.size)[self.rank], None

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Work | None]:
        """This rank's rows, once for each rank."""
        return torch.cat([tensor] * self.size), None

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """`tensor` as it is."""
        return tensor


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _add_up(output: Tensor, parts: Sequence[Tensor]) -> None:
    first, second, *others = parts
    torch.add(first, second, out=output)
    for part in others:
        output.add_(part)


def hold_until(end_ns: int, spin_ns: int) -> None:
    """Returns when the monotonic clock shows `end_ns`; asleep until `spin_ns` before."""
    left = end_ns - time.monotonic_ns()
    if left > spin_ns:
        time.sleep((left - spin_ns) * 1e-9)
    while time.monotonic_ns() < end_ns:
        pass
