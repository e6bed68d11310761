"""An interconnect of chosen latency and bandwidth, for benchmarks and tests on one machine.

The reduce is real: every rank copies its tensor into shared memory and sums the tensors of all ranks in rank order, so
all ranks get the same bits. There is no background thread, as a network adapter needs none. gloo's threads would
compete with the products for the same core, which costs the standard wiring most and fakes a gain. Only the completion
is emulated. Collective k is done at

    end(k) = max(latest rank's launch of k, end(k - 1)) + alpha + bytes * beta         serial wire
    end(k) =     latest rank's launch of k              + alpha + bytes * beta         pipelined wire

in launch order, whatever the order of the waits. `bytes` are those of a rank's tensor in an all-reduce. A
reduce-scatter and an all-gather are the two halves of an all-reduce and each take half of its time. An all-to-all takes
the time of an all-reduce in which each rank of a ring sends as many bytes as the rank here that sends most to others;
of two ranks, `bytes` are those that it sends. An all-to-all of integers, the numbers of rows that follow, takes no time
on the wire and does not wait for it, because libraries such as DeepEP send them with the rows. `start_all_reduce`
returns as soon as the copy is made. `wait` sums and then holds until end(k), asleep except for the last moment:

    rank 0   [copy][ computes                ][ wait: sums | sleeps  | spins ]
    rank 1             [copy][ computes                     ]   :            :
    wire                     ~~~~~~~~~~ alpha + bytes * beta ~~~~~~~~~~~~~~~~^ end

The copy and the sum cost processor time and no wire time; the hold hides the sum.

A message between two ranks takes as long as an all-reduce of its tensor, from the later one of both launches on. On a
serial wire, those from one rank to another follow each other, as in NCCL, where each pair of ranks has a communicator
in each direction's group; other messages and the collectives do not wait for them. gloo's threads carry the tensor,
with the times of the launches. `clocks.py` has the clocks that all of these times are read from.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ladder_lab.link.clocks import LinkClock, WallClock
from ladder_lab.link.shared_memory import SLOTS, SharedSlots
from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.errors import LostPeerError

FIRST_TENSOR_BYTES = 1 << 16
"""Tensor size for which the first slots are made by default."""
TIMEOUT_SECONDS = 600
"""After which a peer that does not launch counts as lost."""
POLL_SECONDS = 20e-6
"""Sleep between two polls of a late peer."""
_Combine = Callable[[Sequence[Tensor]], object]


@dataclass(slots=True, eq=False)
class LinkWork:
    """The handle of a collective on an emulated link.

    Its parts are the ranks' contributions, flat, in rank order. Its time on the wire, and its end, when the wire
    completes it, are known after all ranks have launched it.
    """

    link: "EmulatedLink"
    number: int
    combine: _Combine
    parts: tuple[Tensor, ...]
    wire_ns: int = 0
    end_ns: int = 0

    def wait(self) -> None:
        """Block until result and wire are done; raise LostPeerError if a rank does not launch it within the timeout."""
        self.link.complete(self)


@dataclass(slots=True, eq=False)
class MessageWork:
    """The handle of a message from or to a peer, whose end is known after both ranks have launched it."""

    link: "EmulatedLink"
    route: tuple[int, bool]
    """The peer, and whether the message goes to the lower of both ranks."""
    parts: tuple[Work, ...]
    """The transfers of the tensor and of both times of launch."""
    launched_ns: tuple[Tensor, Tensor]
    wire_ns: int
    end_ns: int = 0

    def wait(self) -> None:
        """Block until the tensor has been transferred and the wire is done."""
        self.link.complete_message(self)


class EmulatedLink(CommGroup):
    """A group whose sums and messages go over an emulated wire; other operations use the real group.

    One thread of a process uses it. Every rank makes the same calls in the same order, except for `wait`. Tensors are
    on the CPU, contiguous, of any dtype, shape and size. A larger tensor than before enlarges the shared memory, which
    blocks until every rank has launched that collective; all-to-alls, whose sizes differ between ranks, cannot do so,
    and need `slot_bytes`. Any number may be in flight: beyond `SLOTS`, a launch first
    computes the oldest sums, which blocks until every rank has launched those; their waits still hold until their ends.

    Attributes:
        waited_seconds: time spent in `wait`: exposed communication, including the sum and late peers.
        clock: the time of this rank.
    """

    def __init__(
        self,
        group: CommGroup,
        alpha_seconds: float = 0.0,
        seconds_per_byte: float = 0.0,
        *,
        serial: bool = True,
        spin_seconds: float = 200e-6,
        slot_bytes: int = FIRST_TENSOR_BYTES,
        clock: LinkClock | None = None,
    ) -> None:
        """Set up shared memory between the ranks of `group`, all on one x86 machine (else UserError); collective.

        Args:
            alpha_seconds: latency of an all-reduce.
            seconds_per_byte: its further time for each byte of one rank's tensor.
            serial: whether a collective begins only after the previous one has ended, as on one NCCL communicator.
            spin_seconds: how long before its end a wait stops sleeping and polls the clock, and how long it polls for
                a late peer before it sleeps. It must exceed the overshoot of a sleep (a tenth of a millisecond on
                Linux), and be short if ranks share a core.
            slot_bytes: size of the tensors for which there is room at first.
            clock: None: a `WallClock`.
        """
        super().__init__(group.ranks, group.rank, group.process_group)
        self._alpha_seconds = alpha_seconds
        self._seconds_per_byte = seconds_per_byte
        self._serial = serial
        self.waited_seconds = 0.0
        self.clock = clock or WallClock(spin_seconds)
        self._spin_ns = round(spin_seconds * 1e9)
        self._last_number = 0
        self._wire_free_ns = 0
        self._unsummed: deque[LinkWork] = deque()
        self._slots = SharedSlots(group, slot_bytes) if self.size > 1 else None
        # Each carries messages of one direction, and the times of launch in both.
        self._carriers = [CommGroup(self.ranks, self.rank, one) for one in (group.process_group, group.descending)]
        self._messages: defaultdict[tuple[int, bool], deque[MessageWork]] = defaultdict(deque)
        self._route_free_ns: defaultdict[tuple[int, bool], int] = defaultdict(int)

    def set_wire(self, alpha_seconds: float, seconds_per_byte: float) -> None:
        """Change the wire for collectives launched from now on; every rank must do so at the same point."""
        self._alpha_seconds = alpha_seconds
        self._seconds_per_byte = seconds_per_byte

    def restart(self) -> None:
        """Begin a measurement on idle ranks and an idle wire, between a barrier and the next launch of every rank."""
        assert not self._unsummed, "a collective is in flight"
        self._wire_free_ns = 0
        self.waited_seconds = 0.0
        self.clock.restart()

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Start summing `tensor` in place, in its dtype and in rank order; None when this rank is alone.

        Raises LostPeerError if there is no more room and a peer does not launch the collectives that occupy it.
        """
        if self.size == 1:
            return None
        # As in torch.distributed, the write is hidden from autograd and from the tensor's version counter.
        data = tensor.data
        return self._launch(tensor, lambda parts: _add_up(data.view(-1), parts), self._wire_ns(tensor.nbytes))

    def start_reduce_scatter(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        """Start a sum of which each rank gets its rows, in half of an all-reduce's time."""
        if self.size == 1:
            return tensor, None
        rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:]) if into is None else into

        def add_up_own(parts: Sequence[Tensor]) -> None:
            _add_up(rows.data.view(-1), [part.chunk(self.size)[self.rank] for part in parts])

        return rows, self._launch(tensor, add_up_own, self._wire_ns(tensor.nbytes, share=0.5))

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        """Start joining all ranks' rows, in half of an all-reduce's time for the result."""
        if self.size == 1:
            return tensor, None
        whole = tensor.new_empty(tensor.shape[0] * self.size, *tensor.shape[1:]) if into is None else into

        def join(parts: Sequence[Tensor]) -> None:
            torch.cat(list(parts), out=whole.data.view(-1))

        return whole, self._launch(tensor, join, self._wire_ns(whole.nbytes, share=0.5))

    def start_all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Work | None]:
        """Start to exchange rows; raise ValueError if this rank sends more than there is room for."""
        if self.size == 1:
            return rows, None
        if rows.nbytes > self._open_slots.slot_bytes:
            room = f"an emulated link with slot_bytes={self._open_slots.slot_bytes}"
            raise ValueError(f"an all-to-all of {rows.nbytes} bytes on {room}")
        into = rows.new_empty(sum(received), *rows.shape[1:])
        width = rows.shape[1:].numel()
        begins = [width * begin for begin in accumulate(sent[:-1], initial=0)]
        number = self._last_number + 1

        def pick_own(parts: Sequence[Tensor]) -> None:
            arriving = into.data.view(-1).split([width * count for count in received])
            for rows_of_peer, part, begin in zip(arriving, parts, self._open_slots.begins(number), strict=True):
                rows_of_peer.copy_(part[begin : begin + len(rows_of_peer)])

        to_others = rows.nbytes - sent[self.rank] * width * rows.itemsize
        reduced_bytes = to_others * self.size / (2 * (self.size - 1))
        wire_ns = self._wire_ns(reduced_bytes) if rows.is_floating_point() else 0
        return into, self._launch(rows, pick_own, wire_ns, begins)

    def start_send(self, tensor: Tensor, target: int) -> Work:
        """Start to send `tensor`."""
        descends = target < self.rank
        transfer = self._carriers[descends].start_send(tensor, target)
        return self._launch_message(transfer, (target, descends), tensor.nbytes)

    def start_receive(self, into: Tensor, source: int) -> Work:
        """Start to receive a tensor."""
        descends = self.rank < source
        transfer = self._carriers[descends].start_receive(into, source)
        return self._launch_message(transfer, (source, descends), into.nbytes)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum `tensor` in place over the wire and return it; other operators use the real group."""
        if op != dist.ReduceOp.SUM:
            return super().all_reduce(tensor, op)
        work = self.start_all_reduce(tensor)
        if work is not None:
            work.wait()
        return tensor

    def complete(self, work: LinkWork) -> None:
        """Wait for `work`; the implementation of `LinkWork.wait`."""
        began = self.clock.now_ns()
        self._sum_up_to(work.number)
        self._hold(work.end_ns, began)

    def complete_message(self, work: MessageWork) -> None:
        """Wait for `work`; the implementation of `MessageWork.wait`."""
        began = self.clock.now_ns()
        while not work.end_ns:
            # The wire carries earlier messages of these ranks in this direction first.
            message = self._messages[work.route].popleft()
            for part in message.parts:
                part.wait()
            begin = max(int(launched_ns) for launched_ns in message.launched_ns)
            if self._serial:
                begin = max(begin, self._route_free_ns[work.route])
            message.end_ns = begin + message.wire_ns
            self._route_free_ns[work.route] = message.end_ns
        self._hold(work.end_ns, began)

    def _hold(self, end_ns: int, began_ns: int) -> None:
        """Block until a time, and count what has passed since the other."""
        self.clock.wait_until(end_ns)
        self.waited_seconds += (self.clock.now_ns() - began_ns) * 1e-9

    def close(self) -> None:
        """Release the shared memory. Not collective; collectives in flight can no longer be waited for."""
        self._unsummed.clear()
        self._messages.clear()
        self._slots = None

    def _launch(self, tensor: Tensor, combine: _Combine, wire_ns: int, begins: Sequence[int] = ()) -> LinkWork:
        """Launch a collective; `begins` are the elements where each rank's part begins, if they get different parts.

        The ranks' tensors may then have different sizes, and `combine` gets whole slots.
        """
        number = self._last_number + 1
        if tensor.nbytes > self._open_slots.slot_bytes:
            # All ranks replace the slots at the same launch. Each unmaps only its own view of the old ones. Powers of
            # two, so that tensors that grow step by step do not cause a replacement at each step.
            self._sum_up_to(self._last_number)
            self._slots = SharedSlots(self, 1 << (tensor.nbytes - 1).bit_length(), self._last_number)
        slots = self._open_slots
        # Block until no rank reads the slot any more.
        self._sum_up_to(number - SLOTS)
        self._await_peers(slots.delivered, number - SLOTS, "summed")
        parts = slots.tensors(number, slots.slot_bytes if begins else tensor.nbytes, tensor.dtype)
        parts[self.rank][: tensor.numel()].copy_(tensor.data.view(-1))
        slots.publish(number, self.clock.now_ns(), wire_ns, begins)
        self._last_number = number
        work = LinkWork(self, number, combine, parts)
        self._unsummed.append(work)
        return work

    def _launch_message(self, transfer: Work, route: tuple[int, bool], num_bytes: int) -> MessageWork:
        """Exchange the times of launch with the peer; on both ranks, messages of a route start in the same order."""
        own_launch = torch.tensor([self.clock.now_ns()])
        peer_launch = torch.zeros(1, dtype=torch.int64)
        peer, descends = route
        carrier = self._carriers[descends]
        parts = transfer, carrier.start_send(own_launch, peer), carrier.start_receive(peer_launch, peer)
        work = MessageWork(self, route, parts, (own_launch, peer_launch), self._wire_ns(num_bytes))
        self._messages[route].append(work)
        return work

    def _wire_ns(self, num_bytes: float, share: float = 1.0) -> int:
        return round(1e9 * share * (self._alpha_seconds + num_bytes * self._seconds_per_byte))

    @property
    def _open_slots(self) -> SharedSlots:
        assert self._slots is not None, "this emulated link is closed"
        return self._slots

    def _sum_up_to(self, number: int) -> None:
        """Compute the results of the oldest collectives, when all ranks have launched them, and find their ends."""
        while self._unsummed and self._unsummed[0].number <= number:
            work = self._unsummed.popleft()
            slots = self._open_slots
            self._await_peers(slots.launched, work.number, "launched")
            begin = slots.last_launch_ns(work.number)
            work.wire_ns = slots.wire_ns(work.number)
            if self._serial and work.wire_ns:
                begin = max(begin, self._wire_free_ns)
            work.end_ns = begin + work.wire_ns
            if work.wire_ns:
                self._wire_free_ns = work.end_ns
            work.combine(work.parts)
            slots.publish_delivered(work.number)

    def _await_peers(self, counters: Callable[[], list[int]], number: int, done: str) -> None:
        """Block until every rank's counter is at least `number`."""
        clock_ns = self.clock.now_ns()
        began = time.monotonic_ns()
        while min(counters()) < number:
            waited = time.monotonic_ns() - began
            if waited > TIMEOUT_SECONDS * 1e9:
                late = [rank for rank, counter in zip(self.ranks, counters(), strict=True) if counter < number]
                what = f"collective {number} of an emulated link within {TIMEOUT_SECONDS} s"
                raise LostPeerError(f"ranks {late} have not {done} {what}")
            if waited > self._spin_ns:
                time.sleep(POLL_SECONDS)
        self.clock.finish_polling(clock_ns)


class Message(NamedTuple):
    """A collective: a tensor of so many bytes on each rank, and its share of the time of their all-reduce.

    In an all-to-all of balanced rows, a rank sends as much as in an all-reduce of half of them.
    """

    num_bytes: int
    ranks: int
    share: float = 1.0


WireTimes = Callable[[Message], float]
"""Seconds of each collective on a wire."""


class NoCommGroup(CommGroup):
    """A group whose reduces do nothing, with wrong results: a lower bound on the step time with any interconnect.

    Attributes:
        messages: the number of each collective so far.
    """

    def __init__(self, group: CommGroup) -> None:
        super().__init__(group.ranks, group.rank, group.process_group)
        self.messages = Counter[Message]()

    def start_all_reduce(self, tensor: Tensor) -> Work | None:
        """Return None: there is nothing to wait for."""
        self.messages[Message(tensor.nbytes, self.size)] += 1
        return None

    def start_all_gather(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Work | None]:
        """Repeat this rank's rows for every rank."""
        whole = torch.cat([tensor] * self.size)
        self.messages[Message(whole.nbytes, self.size, 0.5)] += 1
        return whole if into is None else into.copy_(whole), None

    def start_all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Work | None]:
        """Return this rank's rows in place of those that would arrive, and their numbers in place of the others'.

        So as many arrive as were sent, as if all ranks' choices were the same.
        """
        self.messages[Message(rows.nbytes // 2, self.size)] += 1
        return rows, None

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Return `tensor` unchanged."""
        self.start_all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Gather, because real ranks have to choose the same tokens; without any, repeat this rank's tensor."""
        if self.process_group is not None:
            return super().all_gather(tensor, dim)
        whole, _ = self.start_all_gather(tensor)
        return torch.cat(whole.chunk(self.size), dim)


def _add_up(output: Tensor, parts: Sequence[Tensor]) -> None:
    first, second, *others = parts
    torch.add(first, second, out=output)
    for part in others:
        output.add_(part)
