"""Pipeline schedules: what every rank does, and what the executor keeps."""

import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Queue
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megatron_ladder.comm.group import CommGroup, Work
from megatron_ladder.comm.mesh import ProcessMesh
from megatron_ladder.engine.engine import Engine
from megatron_ladder.engine.schedule import Arrival, Pass, PassClock, Send, Slot, Transfer, make_schedule, run_schedule
from tests.helpers.schedules import played_seconds

SHAPES = [(stages, chunks) for stages in range(1, 7) for chunks in (1, 2, 3) if stages > 1 or chunks == 1]
COUNTS = range(1, 14)


def passes_of(slots: list[Slot], is_forward: bool) -> list[tuple[int, int]]:
    return [slot.work[1:] for slot in slots if slot.work is not None and slot.work.is_forward is is_forward]


@pytest.mark.parametrize(("stages", "chunks"), SHAPES)
def test_every_rank_runs_each_pass_once_and_backward_in_the_order_of_micro_batches(stages: int, chunks: int) -> None:
    for count in COUNTS:
        for slots in make_schedule(stages, chunks, count):
            for is_forward in (True, False):
                passes = passes_of(slots, is_forward)
                assert Counter(passes) == Counter(itertools.product(range(chunks), range(count)))
                for chunk in range(chunks):
                    assert [index for number, index in passes if number == chunk] == list(range(count))
        for slots in make_schedule(stages, chunks, count, trains=False):
            assert not passes_of(slots, False) and len(passes_of(slots, True)) == chunks * count


def run_one_by_one(schedule: list[list[Slot]]) -> None:
    """Replay all ranks, each of which waits in every transfer until its partner has arrived, and at most for that.

    Asserts that inputs arrive before they are read, and that nobody waits for ever.
    """
    stages = len(schedule)
    lines = [deque(step for slot in slots for step in (slot.work, *slot.transfers) if step) for slots in schedule]
    arrived: set[tuple[int, Pass]] = set()
    last = max(slot.work.chunk for slot in schedule[0] if slot.work)
    while any(lines):
        progress = False
        for rank, line in enumerate(lines):
            while line and isinstance(line[0], Pass):
                work = line.popleft()
                is_first = work.is_forward and work.chunk == rank == 0
                assert is_first or (rank, work) in arrived
                if work.is_forward and work.chunk == last and rank == stages - 1:
                    arrived.add((rank, work._replace(is_forward=False)))
                progress = True
        for rank, line in enumerate(lines):
            if line and isinstance(line[0], Transfer) and line[0].source == rank:
                transfer = line[0]
                other = lines[transfer.target]
                if other and other[0] == transfer:
                    line.popleft()
                    other.popleft()
                    arrived.add((transfer.target, transfer.read_by))
                    progress = True
        assert progress, "ranks wait for each other"


@pytest.mark.parametrize(("stages", "chunks"), SHAPES)
@pytest.mark.parametrize("trains", [True, False])
def test_no_rank_waits_in_a_circle_even_if_every_transfer_blocks(stages: int, chunks: int, trains: bool) -> None:
    for count in COUNTS:
        run_one_by_one(make_schedule(stages, chunks, count, trains))


@pytest.mark.parametrize(("stages", "chunks"), SHAPES)
def test_as_few_slots_are_idle_as_the_formula_says(stages: int, chunks: int) -> None:
    for groups in (1, 2, 3):
        count = groups * stages
        for slots in make_schedule(stages, chunks, count):
            assert len(slots) == 2 * (chunks * count + stages - 1)


@pytest.mark.parametrize(("stages", "chunks"), SHAPES)
def test_micro_batches_in_flight_do_not_grow_with_their_number(stages: int, chunks: int) -> None:
    def in_flight(slots: list[Slot]) -> int:
        steps = [1 if slot.work.is_forward else -1 for slot in slots if slot.work]
        return max(itertools.accumulate(steps))

    few, many = ([in_flight(slots) for slots in make_schedule(stages, chunks, n * stages)] for n in (chunks + 1, 16))
    assert few == many
    if chunks == 1:
        assert many == list(range(stages, 0, -1))


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_bubble_is_that_of_the_formula(stages: int, chunks: int) -> None:
    for count in (stages, 2 * stages, 4 * stages):
        # Backward takes longer than forward.
        taken = played_seconds(make_schedule(stages, chunks, count), 1 / chunks, 2 / chunks)
        assert taken / (3 * count) - 1 == pytest.approx((stages - 1) / (chunks * count))


class QueueGroup(CommGroup):
    """Threads as ranks. Messages of a sender fill the receives from it in the order in which these were started.

    Attributes:
        unwaited: the number of sends that nobody has waited for.
    """

    def __init__(self, rank: int, queues: dict[tuple[int, int], Queue[Tensor]]) -> None:
        stages = 1 + max(target for _, target in queues) if queues else 1
        super().__init__(range(stages), rank, None)
        self._queues = queues
        self._started: dict[int, deque[Tensor]] = {rank: deque() for rank in range(stages)}
        self.unwaited = 0

    def start_send(self, tensor: Tensor, target: int) -> Work:
        self._queues[self.rank, target].put(tensor.clone())
        self.unwaited += 1
        return _Wait(lambda: setattr(self, "unwaited", self.unwaited - 1))

    def start_receive(self, into: Tensor, source: int) -> Work:
        into.fill_(float("nan"))
        started = self._started[source]
        started.append(into)

        def wait() -> None:
            while any(buffer is into for buffer in started):
                started.popleft().detach().copy_(self._queues[source, self.rank].get(timeout=30))

        return _Wait(wait)


class _Wait:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


class Alive:
    """Counts tensors in memory.

    Attributes:
        most: the most of them at once.
    """

    def __init__(self) -> None:
        self.most = 0
        self._alive: set[int] = set()

    def note(self, tensor: Tensor) -> Tensor:
        self._alive.add(id(tensor))
        self.most = max(self.most, len(self._alive))
        weakref.finalize(tensor, self._alive.discard, id(tensor))
        return tensor


def run_threads(
    stages: int, chunks: int, count: int, trains: bool = True, early: bool = True, messages: int = 1
) -> tuple[list[Tensor], Tensor, list[int], list[int]]:
    """Run a chain of layers, one per chunk of each rank, with some messages per transfer; return losses, the gradients
    of the layers, and per rank the most states and gradients in memory at once that it has received, and those that it
    has sent."""
    pairs = [(a, b) for a in range(stages) for b in range(stages) if a != b]
    queues: dict[tuple[int, int], Queue[Tensor]] = {pair: Queue() for pair in pairs}
    weights = [torch.arange(3.0) + 1 + 0.1 * number for number in range(stages * chunks)]
    schedule = make_schedule(stages, chunks, count, trains)
    losses: list[Tensor] = []
    gradients = torch.zeros(stages * chunks, 3)
    received_tensors, sent_tensors = ([Alive() for _ in range(stages)] for _ in "rs")
    errors = list[BaseException]()

    def split(state: Tensor) -> Sequence[Tensor]:
        return state.tensor_split(messages) if messages > 1 else [state]

    def rank_of(rank: int) -> None:
        # What entered each chunk, and the factors of the gradients of what left it.
        entered: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

        def run_pass(work: Pass, arrivals: Sequence[Arrival], send: Send) -> Sequence[Tensor]:
            received = torch.cat([arrival.wait() for arrival in arrivals]) if arrivals else None
            leaving = run_whole(work, received)
            if leaving is None:
                return []
            messages = split(leaving)
            for message in messages[:-1]:
                send(message)
            return messages

        def run_whole(work: Pass, received: Tensor | None) -> Tensor | None:
            number = work.chunk * stages + rank
            is_last = number == stages * chunks - 1
            if work.is_forward:
                assert (received is None) is (number == 0)
                state = torch.full((3,), 1.0 + work.micro_batch) if received is None else received
                if trains:
                    entered[work[1:]] = state, torch.cos(state * weights[number])
                leaving = torch.sin(state * weights[number])
                if is_last:
                    losses.append(leaving.sum())
                return None if is_last else sent_tensors[rank].note(leaving)
            state, slope = entered.pop(work[1:])
            gradient = slope if received is None else slope * received
            assert (received is None) is is_last
            gradients[number] += gradient * state
            return None if number == 0 else sent_tensors[rank].note(gradient * weights[number])

        def allocate(work: Pass) -> Sequence[Tensor]:
            return split(received_tensors[rank].note(torch.empty(3)))

        group = QueueGroup(rank, queues)
        try:
            clock = PassClock(is_cuda=False)
            run_schedule(schedule[rank], group, run_pass, allocate, clock, receives_early=early)
            assert group.unwaited == 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert all(queue.empty() for queue in queues.values())
    return losses, gradients, [one.most for one in received_tensors], [one.most for one in sent_tensors]


def expected(layers: int, count: int) -> tuple[list[Tensor], Tensor]:
    weights = [(torch.arange(3.0) + 1 + 0.1 * number).requires_grad_() for number in range(layers)]
    losses = []
    for index in range(count):
        state = torch.full((3,), 1.0 + index)
        for weight in weights:
            state = torch.sin(state * weight)
        losses.append(state.sum())
        losses[-1].backward()
    return [loss.detach() for loss in losses], torch.stack([one.grad for one in weights if one.grad is not None])


@pytest.mark.parametrize("messages", [1, 2])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("stages", "chunks", "count"),
    [(1, 1, 3), (2, 1, 1), (2, 1, 5), (3, 1, 2), (4, 1, 9), (2, 2, 1), (2, 2, 5), (3, 2, 4), (3, 3, 7)],
)
def test_the_executor_computes_what_one_rank_computes(
    stages: int, chunks: int, count: int, early: bool, messages: int
) -> None:
    losses, gradients = expected(stages * chunks, count)
    found, found_gradients, _, sent = run_threads(stages, chunks, count, early=early, messages=messages)
    assert found == losses and torch.equal(found_gradients, gradients)
    # The last one under way while the next one is computed.
    assert max(sent) <= 2
    options = {"trains": False, "early": early, "messages": messages}
    found, found_gradients, received, sent = run_threads(stages, chunks, count, **options)
    assert found == losses and not found_gradients.any() and max(sent) <= 2
    # With chunks, states wait until it is their chunk's turn.
    assert max(received) <= 2 + stages * (chunks > 1)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (2, 2), (3, 2)])
def test_states_in_memory_do_not_grow_with_the_number_of_micro_batches(stages: int, chunks: int) -> None:
    few, many = (run_threads(stages, chunks, n * stages) for n in (chunks + 1, 8 * chunks))
    assert max(many[2]) <= max(few[2]) + 1 and max(many[3]) <= 2
    if chunks == 1:
        # A state per micro-batch in flight, and the next state and gradient, which arrive under a pass.
        assert all(most <= stages - rank + 2 for rank, most in enumerate(many[2]))


FORWARD, BACKWARD, SEND, RECEIVE = 3.0, 5.0, 0.25, 2.0
"""Seconds of passes, and of the waits for sends and receives."""


class SlowGroup(CommGroup):
    """The first of two ranks, on a clock that only passes and waits advance."""

    now = 100.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def start_send(self, tensor: Tensor, target: int) -> Work:
        return _Wait(lambda: self.advance(SEND))

    def start_receive(self, into: Tensor, source: int) -> Work:
        return _Wait(lambda: self.advance(RECEIVE))


class Event:
    """Replaces `torch.cuda.Event`, with the time of that clock."""

    def __init__(self, group: SlowGroup) -> None:
        self._group = group
        self.at = float("nan")

    def record(self) -> None:
        self.at = self._group.now

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize("is_cuda", [False, True])
@pytest.mark.parametrize(("chunks", "messages"), [(1, 1), (2, 1), (2, 2)])
def test_the_clock_separates_passes_from_waits(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool, chunks: int, messages: int
) -> None:
    group, count = SlowGroup(range(2), 0, None), 3
    monkeypatch.setattr("time.perf_counter", lambda: group.now)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(group))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "computes")
    if is_cuda:
        monkeypatch.delattr("time.perf_counter")

    def run_pass(work: Pass, arrivals: Sequence[Arrival], send: Send) -> Sequence[Tensor]:
        group.advance(FORWARD if work.is_forward else BACKWARD)
        return torch.ones(messages, 3).unbind()

    buffers = torch.ones(messages, 3).unbind()
    clock = PassClock(is_cuda)
    assert clock.seconds() == (0.0, 0.0)
    run_schedule(make_schedule(2, chunks, count)[0], group, run_pass, lambda work: buffers, clock)
    busy = chunks * count * (FORWARD + BACKWARD)
    # The first chunk sends and receives no gradient of its input, and the second one receives its state as well.
    transfers = messages * count * (2 * chunks - 1)
    assert clock.seconds() == pytest.approx((busy, busy + transfers * (SEND + RECEIVE)))


def test_waits_on_another_stream_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    group, streams = SlowGroup(range(2), 0, None), ["computes"]
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(group))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[0])
    clock = PassClock(is_cuda=True)
    clock.mark()
    streams[0] = "side"
    clock.mark()
    group.advance(1.0)
    clock.mark()
    streams[0] = "computes"
    group.advance(2.0)
    clock.mark()
    assert clock.seconds() == (3.0, 3.0)


@pytest.mark.parametrize(("value", "early"), [(None, True), ("", True), ("0", True), ("1", False)])
def test_receives_start_late_if_launches_block(monkeypatch: pytest.MonkeyPatch, value: str | None, early: bool) -> None:
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    executed = Mock()
    monkeypatch.setattr("megatron_ladder.engine.engine.run_schedule", executed)
    engine = Engine(Mock(chunks=1), Mock(), ProcessMesh.single(), torch.device("cpu"))
    engine.run_passes([], trains=True)
    assert executed.call_args.kwargs["receives_early"] is early
