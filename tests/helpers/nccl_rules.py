"""Plays the passes and messages of pipeline ranks by NCCL's rules, on a CPU: whether they end, and how long they take.

    host       puts passes, messages and waits in queues, without waiting for them
    compute    runs passes and waits in that order; a wait ends when its message has ended
    channels   two ranks have one in each process group. A message starts on its rank after everything that `compute`
               had been given, and after the channel's earlier messages; it moves when both ranks have started it

Everything that starts or ends is a node of a graph, and waits for other nodes. Ranks wait for each other for ever
exactly if the graph has a cycle. If it has none, its longest path is the time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.engine.schedule import Arrival, Pass, PassClock, Send, Slot, run_schedule


class Computes(NamedTuple):
    """A pass."""

    seconds: float


class Starts(NamedTuple):
    """A rank's end of a message."""

    process_group: str
    source: int
    target: int
    size: int


class Waits(NamedTuple):
    """A wait for the message that the program started at an index, to send or to receive it."""

    started_at: int
    receives: bool


Program = list[Computes | Starts | Waits]
"""What a rank's host launches, in order."""
_Node = tuple[int, int, str]
"""A rank, an index in its program, and `start` or `end`."""


class DisagreementError(Exception):
    """Two ranks exchange different messages."""


@dataclass(frozen=True)
class Rules:
    """How launches are carried out.

    Attributes:
        transfer: seconds of a message.
        one_queue: an item starts only after all that the host launched before (CUDA_DEVICE_MAX_CONNECTIONS=1).
        blocks: the host waits for the end of everything that it launches (CUDA_LAUNCH_BLOCKING=1).
        bound: a message waits for its sender's pass only, and nothing waits for a send: no order can be faster.
    """

    transfer: float = 0.0
    one_queue: bool = False
    blocks: bool = False
    bound: bool = False

    def play(self, programs: Sequence[Program]) -> float:
        """Return the seconds until all ranks are done.

        Raise `graphlib.CycleError` if ranks wait for each other for ever, or DisagreementError.
        """
        graph: dict[_Node, list[_Node]] = {}
        for rank, program in enumerate(programs):
            graph |= self._nodes_of(rank, program)
        for (sender, sent), (receiver, received) in _messages(programs):
            graph[receiver, received, "end"].append((sender, sent, "start"))
            if not self.bound:
                graph[sender, sent, "end"].append((receiver, received, "start"))
        ends: dict[_Node, float] = {}
        for node in TopologicalSorter(graph).static_order():
            rank, index, what = node
            item = programs[rank][index]
            seconds = 0.0
            if what == "end" and not isinstance(item, Waits):
                seconds = item.seconds if isinstance(item, Computes) else self.transfer
            ends[node] = max((ends[before] for before in graph[node]), default=0.0) + seconds
        return max(ends.values())

    def _nodes_of(self, rank: int, program: Program) -> dict[_Node, list[_Node]]:
        """Return the nodes of a rank, and which of its own nodes each waits for."""
        graph: dict[_Node, list[_Node]] = {}
        computed: list[_Node] = []
        channels: dict[tuple[str, frozenset[int]], list[_Node]] = {}
        for index, item in enumerate(program):
            start, end = (rank, index, "start"), (rank, index, "end")
            graph[start] = [*computed]
            graph[end] = [start]
            if isinstance(item, Starts):
                channel = item.process_group, frozenset((item.source, item.target))
                if not self.bound:
                    graph[start] += channels.get(channel, [])
                elif item.target == rank:
                    graph[end] = []
                channels[channel] = [end]
            else:
                computed = [end]
            if isinstance(item, Waits) and (item.receives or not self.bound):
                graph[start].append((rank, item.started_at, "end"))
            if index and self.one_queue:
                graph[start].append((rank, index - 1, "start"))
            if index and self.blocks:
                graph[start].append((rank, index - 1, "end"))
        return graph


def _messages(programs: Sequence[Program]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield rank and index of both ends of each message: the n-th send to a rank meets its n-th receive."""
    sends: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    receives: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[tuple[int, int], int] = {}
    for rank, program in enumerate(programs):
        for index, item in enumerate(program):
            if isinstance(item, Starts):
                ends = sends if item.source == rank else receives
                ends[item.process_group, item.source, item.target].append((rank, index))
                sizes[rank, index] = item.size
    for lane in sends.keys() | receives.keys():
        for sent, received in zip(sends[lane], receives[lane], strict=True):
            if sizes[sent] != sizes[received]:
                raise DisagreementError(f"{lane}: {sizes[sent]} numbers are sent, and {sizes[received]} received")
            yield sent, received


class Recording:
    """Runs the executor of a rank, and records what its host launches.

    Transfers have some messages. A pass of several sends all but the last one when half of its time is over, and waits
    then for all that it receives.
    """

    def __init__(self, stages: int, rank: int, has_two_groups: bool, messages: int = 1) -> None:
        self.program: Program = []
        self._messages = messages
        groups: Any = ("ascending", "descending" if has_two_groups else None)
        self._group = CommGroup(range(stages), rank, *groups)

    def run(self, slots: Sequence[Slot], seconds: Callable[[Pass], float], receives_early: bool) -> Program:
        """Return the program of a rank whose passes take these seconds.

        The number of a message's elements is another for each micro-batch, cut between chunks and place in a transfer.
        """
        stages = self._group.size
        chunks = 1 + max(slot.work.chunk for slot in slots if slot.work is not None)
        cuts = stages * chunks - 1

        def messages(work: Pass, enters: bool) -> list[Tensor]:
            """Return what a pass receives, or sends."""
            cut = work.chunk * stages + self._group.rank - (work.is_forward is enters)
            first = self._messages * (cut + cuts * work.micro_batch)
            return [torch.empty(1 + first + place) for place in range(self._messages)] if 0 <= cut < cuts else []

        def run_pass(work: Pass, arrivals: Sequence[Arrival], send: Send) -> Sequence[Tensor]:
            self.program.append(Computes(seconds(work) / 2))
            received = [arrival.wait() for arrival in arrivals]
            assert [len(message) for message in received] == [len(message) for message in messages(work, enters=True)]
            sent = messages(work, enters=False)
            for message in sent[:-1]:
                send(message)
            self.program.append(Computes(seconds(work) / 2))
            return sent

        def allocate(work: Pass) -> Sequence[Tensor]:
            return messages(work, enters=True)

        with mock.patch.multiple(dist, isend=self._send, irecv=self._receive):
            run_schedule(slots, self._group, run_pass, allocate, PassClock(False), receives_early)
        return self.program

    def _send(self, tensor: Tensor, group: str, group_dst: int) -> Work:
        return self._start(Starts(group, self._group.rank, group_dst, tensor.numel()))

    def _receive(self, tensor: Tensor, group: str, group_src: int) -> Work:
        return self._start(Starts(group, group_src, self._group.rank, tensor.numel()))

    def _start(self, message: Starts) -> Work:
        index, receives = len(self.program), message.target == self._group.rank
        self.program.append(message)
        return mock.Mock(wait=lambda: self.program.append(Waits(index, receives)))


def programs_of(
    schedule: Sequence[Sequence[Slot]],
    receives_early: bool = True,
    seconds: Callable[[Pass], float] = lambda work: 1.0,
    has_two_groups: bool = True,
    messages: int = 1,
) -> list[Program]:
    """Return the programs of all ranks of a schedule, as the executor launches them."""
    stages = len(schedule)
    return [
        Recording(stages, rank, has_two_groups, messages).run(slots, seconds, receives_early)
        for rank, slots in enumerate(schedule)
    ]
