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

No rank can wait for another in a circle, whatever the backend: all ranks start their sends and receives in one order,
by slot, sender and receiver. So they need no batches, in which NCCL would make all transfers of a rank wait for each
other, and all ranks of the group enter the first one. A receive is waited for before the pass that reads it, a send
after the pass of the next slot, so both run under computation, and at most one slot's sends are in flight.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work


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
def make_schedule(stages: int, chunks: int, micro_batches: int, trains: bool = True) -> list[list[Slot]]:
    """Return the slots of every rank: 1F1B, interleaved for several chunks, or forward passes only.

    A pass runs in the first slot in which its rank is free and its input has arrived.
    """
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
        for rank, work in enumerate(works):
            rank_transfers = tuple(transfer for transfer in transfers if rank in (transfer.source, transfer.target))
            slots[rank].append(Slot(work, rank_transfers))
    return slots


class PassClock:
    """Measures how long a rank's passes take, with and without its waits for messages of other ranks.

    On CUDA, events of the stream that computes mark the waits, so the host waits for nothing.
    """

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._marks: list[Any] = []
        """Begin and end of each stretch of passes, between which the rank waits."""

    def mark(self) -> None:
        """Record the current time, on CUDA that of the current stream."""
        mark: Any = torch.cuda.Event(enable_timing=True) if self._is_cuda else time.perf_counter()
        if self._is_cuda:
            mark.record()
        self._marks.append(mark)

    def seconds(self) -> tuple[float, float]:
        """Return the seconds without and with waits; zeros without marks. The device must have run them all."""
        times = [self._marks[0].elapsed_time(mark) / 1e3 for mark in self._marks] if self._is_cuda else self._marks
        return sum(times[1::2]) - sum(times[::2]), times[-1] - times[0] if times else 0.0


Forward = Callable[[Pass, Tensor | None], Tensor]
"""Maps the state that enters a chunk, None for the token ids, to the one that leaves it, or to the loss."""
Backward = Callable[[Tensor, Tensor | None], None]
"""Runs backward from what a forward pass returned, with its gradient, or None for the loss."""


def run_schedule(
    slots: Sequence[Slot],
    pipeline: CommGroup,
    forward: Forward,
    backward: Backward | None,
    allocate: Callable[[Pass], Tensor],
    clock: PassClock,
) -> None:
    """Run this rank's slots; `allocate` returns a buffer for the state that enters a forward pass.

    Without `backward`, all passes of the slots are forward passes. The clock must be new.
    """
    clock.mark()
    entered: dict[tuple[int, int], Tensor | None] = {}
    left: dict[tuple[int, int], Tensor] = {}
    arriving: dict[Pass, tuple[Tensor, Work]] = {}
    sent: list[tuple[Tensor, Work]] = []
    for work, transfers in slots:
        result: Tensor | None = None
        if work is not None:
            received, in_flight = arriving.pop(work, (None, None))
            if in_flight is not None:
                clock.mark()
                in_flight.wait()
                clock.mark()
            key = work.chunk, work.micro_batch
            if work.is_forward:
                if received is not None and backward is not None:
                    received.requires_grad_()
                result = forward(work, received)
                if backward is not None:
                    entered[key], left[key] = received, result
            else:
                assert backward is not None
                backward(left.pop(key), received)
                entering = entered.pop(key)
                result = None if entering is None else entering.grad
        if sent:
            clock.mark()
            for _, in_flight in sent:
                in_flight.wait()
            clock.mark()
            sent.clear()
        for transfer in transfers:
            if transfer.source == pipeline.rank:
                assert result is not None
                sent.append((result, pipeline.start_send(result.detach(), transfer.target)))
                continue
            read_by = transfer.read_by
            buffer = allocate(read_by) if read_by.is_forward else torch.empty_like(left[read_by[1:]])
            arriving[read_by] = buffer, pipeline.start_receive(buffer, transfer.source)
    clock.mark()
