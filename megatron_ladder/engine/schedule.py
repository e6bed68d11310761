"""Pipeline schedules as data, and the executor that runs any of them.

Time is cut into slots. In a slot a rank runs at most one pass (of one chunk of layers, for one micro-batch), and then
exchanges the results of the slot's passes. 1F1B of four micro-batches on three ranks, one chunk each (`2` is the
forward pass of micro-batch 2, `2'` its backward pass):

    slot      0    1    2    3    4    5    6    7    8    9   10   11
    rank 0    0    1    2              0'   3    1'        2'        3'
    rank 1         0    1         0'   2    1'   3    2'        3'
    rank 2              0    0'   1    1'   2    2'   3    3'

A rank that is r stages before the last one has at most r + 1 micro-batches in flight, however many there are. With
several chunks per rank, the states travel through the ranks once per chunk.

A rank starts the receives of a slot before its pass, and the sends after it. A receive is waited for before the pass
that reads it, a send after the pass of the next slot, so both run under computation, and at most one slot's sends are
in flight. Rank 1 in slots 4 and 5 (`>`: starts, `.`: waits for):

    > receive 3 of rank 0,  . 1' of slot 3,  [pass 1'],  . send of slot 3,  > send 1' to rank 0
    > receive 2' of rank 2, . 3 of slot 4,   [pass 3],   . send 1',         > send 3 to rank 2

A transfer may have several messages, in an order that both ranks know (`model/cut.py`). A pass may send the first ones
before it ends, and waits for the second and later ones where it reads them. Their receives start after the pass of the
slot, because a receive cannot start before the messages ahead of it have moved.

No rank can wait for another in a circle, even if a message moves only when both ranks have started it and after the
earlier messages of the same ranks in the same direction, as with NCCL: what a rank does in a slot waits for messages of
earlier slots only. This needs a group for each direction, because rank 1 has started to receive from rank 2 when it
sends to it. It needs no batches, in which NCCL would make all transfers of a rank wait for each other.

If the host waits for what it starts (CUDA_LAUNCH_BLOCKING=1), no receive may start before the pass, because the other
rank may be waiting for a receive, too. Then all ranks start their sends and receives after the passes in one order, by
slot, sender and receiver.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.model.cut import send_at_the_end


class Pass(NamedTuple):
    """One pass of a rank, over one of its chunks of layers."""

    is_forward: bool
    chunk: int
    micro_batch: int


class Transfer(NamedTuple):
    """A state that one rank sends to the next one, or its gradient, which travels back."""

    source: int
    target: int
    read_by: Pass
    """The pass of the receiver."""


class Slot(NamedTuple):
    """A rank's pass in a slot, if it has one, and the transfers after it, in the order of all ranks."""

    work: Pass | None
    transfers: Sequence[Transfer]


def _passes(rank: int, stages: int, chunks: int, micro_batches: int, trains: bool) -> Iterator[Pass]:
    """Yield the passes of a rank in order: those that fill the pipeline, then backward and forward alternately.

    Several chunks take turns after as many micro-batches as there are ranks (arXiv 2104.04473, section 2.2). The first
    turn also includes the remainder of the division.
    """
    first = micro_batches if micro_batches < stages else stages + micro_batches % stages
    groups = [range(first), *(range(start, start + stages) for start in range(first, micro_batches, stages))]
    forward = deque(Pass(True, chunk, index) for group in groups for chunk in range(chunks) for index in group)
    if not trains:
        yield from forward
        return
    backward = [Pass(False, chunk, index) for group in groups for chunk in reversed(range(chunks)) for index in group]
    ahead = stages - rank - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * first
    for _ in range(min(ahead, len(forward))):
        yield forward.popleft()
    for work in backward:
        if forward:
            yield forward.popleft()
        yield work


def _transfer(rank: int, work: Pass, stages: int, chunks: int) -> Transfer | None:
    """Return where the result of a pass goes; None at the ends of the model."""
    position = work.chunk * stages + rank + (1 if work.is_forward else -1)
    if not 0 <= position < chunks * stages:
        return None
    chunk, target = divmod(position, stages)
    return Transfer(rank, target, work._replace(chunk=chunk))


@lru_cache(maxsize=8)
def make_schedule(
    stages: int, chunks: int, micro_batches: int, trains: bool = True, lowest: int = 0
) -> list[list[Slot]]:
    """Return the slots of every rank: 1F1B, interleaved for several chunks, or forward passes only.

    A pass runs in the first slot in which its rank is free and its input has arrived. Of all chunks in the order of the
    model, backward ends with number `lowest`; the slots of further passes and transfers stay empty.
    """

    def is_needed(rank: int, work: Pass | None) -> bool:
        return work is not None and (work.is_forward or work.chunk * stages + rank >= lowest)

    waiting = [deque(_passes(rank, stages, chunks, micro_batches, trains)) for rank in range(stages)]
    slots: list[list[Slot]] = [[] for _ in range(stages)]
    # The first pass of a micro-batch reads its token ids.
    arrived = {(0, Pass(True, 0, index)) for index in range(micro_batches)}
    while any(waiting):
        works = [line.popleft() if line and (rank, line[0]) in arrived else None for rank, line in enumerate(waiting)]
        assert any(works), "the passes of a schedule wait for each other"
        transfers = []
        for rank, work in enumerate(works):
            transfer = work and _transfer(rank, work, stages, chunks)
            if transfer:
                transfers.append(transfer)
                arrived.add((transfer.target, transfer.read_by))
            elif work and work.is_forward:
                # The last forward pass of a micro-batch makes its loss.
                arrived.add((rank, work._replace(is_forward=False)))
        transfers.sort()
        transfers = [transfer for transfer in transfers if is_needed(transfer.target, transfer.read_by)]
        for rank, work in enumerate(works):
            rank_transfers = tuple(transfer for transfer in transfers if rank in (transfer.source, transfer.target))
            slots[rank].append(Slot(work if is_needed(rank, work) else None, rank_transfers))
    return slots


class PassClock:
    """Measures how long a rank's passes take, with and without its waits for messages of other ranks.

    On CUDA, events of the stream that computes mark the waits, so the host waits for nothing. Waits on another stream
    run under computation, and do not count.
    """

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._stream = torch.cuda.current_stream() if is_cuda else None
        self._marks: list[Any] = []
        """Begin and end of each stretch of passes, between which the rank waits."""

    def mark(self) -> None:
        """Record the current time, on CUDA that of the stream that computes, if it is the current one."""
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
        elif torch.cuda.current_stream() == self._stream:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()

    def seconds(self) -> tuple[float, float]:
        """Return the seconds without and with waits; zeros without marks. The device must have run them all."""
        times = [self._marks[0].elapsed_time(mark) / 1e3 for mark in self._marks] if self._is_cuda else self._marks
        return sum(times[1::2]) - sum(times[::2]), times[-1] - times[0] if times else 0.0


class Arrival:
    """A message that a rank receives."""

    def __init__(self, message: Tensor, work: Work, clock: PassClock) -> None:
        self._message = message
        self._work: Work | None = work
        self._clock = clock

    def wait(self) -> Tensor:
        """Return the message when it has arrived; may be called again."""
        if self._work is not None:
            self._clock.mark()
            self._work.wait()
            self._clock.mark()
            self._work = None
        return self._message


Send = Callable[[Tensor], None]
"""Starts to send the next message of the running pass, or leaves it for the end of the pass."""
RunPass = Callable[[Pass, Sequence[Arrival], Send], Sequence[Tensor]]
"""Runs a pass with the messages that it receives, none at the ends of the model, and returns the messages that it
sends, if any: a forward pass maps the state that enters a chunk to the one that leaves it, a backward pass their
gradients the other way. The first message has arrived. The pass may itself send the first of its messages.

The results are read until the rank's pass of the next slot has ended."""
Allocate = Callable[[Pass], Sequence[Tensor]]
"""Returns the buffers of the messages that a pass receives, in the order in which they are sent. They are written from
before the pass of the slot in which the messages are sent until the pass that receives them has waited for them."""


def run_schedule(
    slots: Sequence[Slot],
    pipeline: CommGroup,
    run_pass: RunPass,
    allocate: Allocate,
    clock: PassClock,
    receives_early: bool = True,
) -> None:
    """Run this rank's slots. The clock must be new.

    Nothing is kept of what has been sent. Without `receives_early`, sends and receives start in the order for launches
    that block.
    """
    early = 1 if receives_early else 0
    """The number of messages of a transfer that are received under the pass before it."""
    clock.mark()
    arriving: dict[Pass, list[Arrival]] = {}
    sending: list[tuple[Tensor, Work]] = []

    def start_send(target: int, message: Tensor) -> None:
        sending.append((message, pipeline.start_send(message, target)))

    def start_receives(transfer: Transfer, buffers: Sequence[Tensor]) -> None:
        started = [Arrival(buffer, pipeline.start_receive(buffer, transfer.source), clock) for buffer in buffers]
        arriving.setdefault(transfer.read_by, []).extend(started)

    def wait_for(sent: list[tuple[Tensor, Work]]) -> None:
        for _, work in sent:
            clock.mark()
            work.wait()
            clock.mark()
        sent.clear()

    def run(work: Pass, send: Send) -> Sequence[Tensor]:
        arrivals = arriving.pop(work, [])
        for arrival in arrivals[:1]:
            arrival.wait()
        messages = run_pass(work, arrivals, send)
        for arrival in arrivals:
            arrival.wait()
        return messages

    for work, transfers in slots:
        targets = [transfer.target for transfer in transfers if transfer.source == pipeline.rank]
        receives = {transfer: allocate(transfer.read_by) for transfer in transfers if transfer.target == pipeline.rank}
        for transfer in receives:
            start_receives(transfer, receives[transfer][:early])
        earlier = sending
        sending = []
        messages: Sequence[Tensor] = ()
        if work is not None:
            send = partial(start_send, targets[0]) if targets and early else send_at_the_end
            messages = run(work, send)
        wait_for(earlier)
        for transfer in transfers:
            if transfer.source == pipeline.rank:
                assert messages
                for message in messages[len(sending) :]:
                    start_send(transfer.target, message)
            else:
                start_receives(transfer, receives[transfer][early:])
        receives.clear()
    wait_for(sending)
    clock.mark()
