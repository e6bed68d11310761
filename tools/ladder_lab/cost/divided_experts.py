"""Time of the passes of a model whose routed experts are divided over expert-parallel ranks.

`forward_events` lists the events of a forward pass in the order of `model/sub_block.py`, for any wiring, from its plan
of reads alone. Tokens start to travel (dispatch) at once where what their experts see has arrived, or a whole sub-block
has hidden it; otherwise in the middle of the sub-block before, in front of its output projection. Where the next
sub-block sees the output of the experts at once, they run in that middle. `standard` with a shared expert, S:

    compute   ... A ][ read S, R ][ S: up |][ R ][| down ][ read A of the next layer ...
    wire                           dispatch       combine

A backward pass is exactly the reverse: each launch is a wait and each wait a launch, so the same bodies hide the
all-to-alls of gradients. In addition, weight gradients, which nothing needs, are kept until the next wait. A sub-block
that is recomputed reads its input again, which is launched under the sub-block that goes backward before it.

Each group of ranks has a serial wire. A dense sub-block gathers its input and reduce-scatters its output, as with
sequence parallelism, which tensor parallelism needs here.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ladder_lab.cost.links import SimulatedClock, SimulatedCollective, SubBlockTime, WireModel
from megatron_ladder.blueprint.wiring import ReadPlan


class Event(NamedTuple):
    """One event of a pass."""

    action: Literal["launch", "wait", "compute"]
    what: Literal["input", "output", "input again", "work", "projection", "forward"]
    """What travels, or what is computed: the output projection, all before it, or the whole forward again."""
    position: int
    """That of the sub-block."""


@dataclass(frozen=True)
class Schedule:
    """How passes overlap; by default as the trainer runs them."""

    reads_ahead: bool = True
    """Whether tokens travel before their sub-block begins, and experts run in the middle of another one."""
    late_weight_gradients: bool = True
    """Whether weight gradients wait for the next collective, or run at once, under the sum of the input's gradient."""


class PassTime(NamedTuple):
    """The time of a pass."""

    seconds: float
    wire: float
    """Seconds of its collectives."""
    hidden: float
    """Share of these in which this rank computes; 1 without any."""


def forward_events(blocks: Sequence[SubBlockTime], schedule: Schedule) -> list[Event]:
    """Return the events of a forward pass, in order."""
    return [*_ForwardOrder(blocks, schedule.reads_ahead).events()]


def backward_events(forward: Sequence[Event], again: Collection[int], recompute: bool) -> list[Event]:
    """Return the events of the backward pass of a forward pass, in order.

    Sub-blocks at the positions in `again` read their input again; with `recompute`, all compute forward again.
    """
    computed = dict.fromkeys(event.position for event in reversed(forward) if event.action == "compute")
    unread = [position for position in computed if position in again]
    events: list[Event] = []
    begun, ready = set[int](), set[int]()

    def read_next() -> None:
        if unread:
            events.append(Event("launch", "input again", unread.pop(0)))

    read_next()
    for action, what, position in reversed(forward):
        if position not in ready and (action, what) != ("wait", "output"):
            # The gradient of the output is awaited next.
            ready.add(position)
            if position in again:
                events.append(Event("wait", "input again", position))
            if recompute:
                events.append(Event("compute", "forward", position))
        if action == "compute" and position not in begun:
            begun.add(position)
            read_next()
        mirrored: dict[str, Literal["launch", "wait", "compute"]] = {"launch": "wait", "wait": "launch"}
        events.append(Event(mirrored.get(action, action), what, position))
    return events


class _ForwardOrder:
    def __init__(self, blocks: Sequence[SubBlockTime], reads_ahead: bool) -> None:
        self._blocks = blocks
        self._plan = ReadPlan.of(block.missing for block in blocks)
        self._reads_ahead = reads_ahead
        self._next_input = 0
        """The first position whose input has not been read."""
        self._pending = set[int]()
        """Outputs that the stream lacks; of joined ones, the last."""

    def events(self) -> Iterator[Event]:
        """Yield the events."""
        done = set[int]()
        for position in range(len(self._blocks)):
            if position in done:
                continue
            if self._next_input == position:
                yield from self._read()
            yield from self._read_ahead(position, self._is_hidden)
            yield Event("wait", "input", position)
            yield Event("compute", "work", position)
            if self._runs_inside(position):
                done.add(position + 1)
                yield from self._run(position + 1)
            else:
                yield from self._read_ahead(position, self._is_hidden_or_next)
            yield Event("compute", "projection", position)
            yield from self._leave(position)
        for output in sorted(self._pending):
            yield Event("wait", "output", output)

    def _run(self, position: int) -> Iterator[Event]:
        yield Event("wait", "input", position)
        yield Event("compute", "work", position)
        yield Event("compute", "projection", position)
        yield from self._leave(position)

    def _leave(self, position: int) -> Iterator[Event]:
        if not self._blocks[position].joins_next:
            self._pending.add(position)
            yield Event("launch", "output", position)

    def _read(self) -> Iterator[Event]:
        position = self._next_input
        self._next_input += 1
        for output in self._plan.arriving(position):
            if output in self._pending:
                self._pending.remove(output)
                yield Event("wait", "output", output)
        yield Event("launch", "input", position)

    def _read_ahead(self, position: int, is_ready: Callable[[int, int], bool]) -> Iterator[Event]:
        """Read what is next to be read, if all outputs that it sees are ready."""
        inputs = self._inputs_ahead(position)
        if all(is_ready(output, position) for one in inputs for output in self._plan.arriving(one)):
            for _ in inputs:
                yield from self._read()

    def _inputs_ahead(self, position: int) -> range:
        """Return the inputs up to the next one whose tokens travel, or else the next one that ranks gather."""
        if not self._reads_ahead:
            return range(0)
        further = range(self._next_input, len(self._blocks))
        for ahead in further:
            if self._blocks[ahead].moves_tokens:
                inputs = range(further.start, ahead + 1)
                if all(output < position for one in inputs for output in self._plan.arriving(one)):
                    return inputs
                break
        # A gather; without one, an early wait would gain nothing.
        gathers = further.start == position + 1 < len(self._blocks) and self._blocks[position + 1].read_seconds > 0
        return further[:1] if gathers else range(0)

    def _is_hidden(self, output: int, position: int) -> bool:
        """Whether an output has arrived before the sub-block at a position, or a whole sub-block has hidden it."""
        if output not in self._pending:
            return output < position
        return self._blocks[output].reduce_seconds == 0 or output < position - 1

    def _is_hidden_or_next(self, output: int, position: int) -> bool:
        """Whether an output is hidden, or the next sub-block waits for it."""
        is_next = output < position and self._plan.arrivals[output] == position + 1
        return is_next or self._is_hidden(output, position)

    def _runs_inside(self, position: int) -> bool:
        """Whether the next sub-block's experts run in the middle of this one."""
        experts = position + 1
        if not self._reads_ahead or experts == len(self._blocks) or not self._blocks[experts].moves_tokens:
            return False
        reads_same = not self._plan.arriving(experts) and self._plan.arrivals[position] > experts
        return reads_same and self._plan.arrivals[experts] == experts + 1


class Activity(NamedTuple):
    """What a rank does for some time of a pass."""

    event: Event | None
    """None: weight gradients."""
    start: float
    end: float


def play(
    events: Sequence[Event],
    blocks: Sequence[SubBlockTime],
    clock: SimulatedClock,
    token_contention: float | None,
    late_weight_gradients: bool,
    backward: bool,
) -> Iterator[Activity]:
    """Advance a clock by the events of a pass, and yield what this rank does, in order; see `pass_times`."""
    launched: dict[tuple[str, int], SimulatedCollective] = {}
    weight_gradients = 0.0
    for event in events:
        block = blocks[event.position]
        key = event.what, event.position
        start = clock.now
        if event.action == "launch":
            seconds = _wire_seconds(block, event.what)
            if seconds:
                group = "experts" if block.moves_tokens else "tensor"
                launched[key] = clock.launch(seconds, group, token_contention if block.moves_tokens else None)
            continue
        if key in launched or not late_weight_gradients:
            clock.compute(weight_gradients)
            yield Activity(None, start, clock.now)
            weight_gradients = 0.0
            start = clock.now
        if event.action == "compute":
            clock.compute(_compute_seconds(block, event.what, backward))
            if backward and event.what != "forward":
                is_projection = event.what == "projection"
                weight_gradients += block.output_wgrad_seconds if is_projection else block.wgrad_seconds
        elif key in launched:
            clock.wait(launched.pop(key))
        yield Activity(event, start, clock.now)
    start = clock.now
    clock.compute(weight_gradients)
    yield Activity(None, start, clock.now)


def _wire_seconds(block: SubBlockTime, what: str) -> float:
    return block.reduce_seconds if what == "output" else block.read_seconds


def _compute_seconds(block: SubBlockTime, what: str, backward: bool) -> float:
    if what == "projection":
        return block.output_seconds
    if what == "forward":
        return block.forward_seconds
    return (block.dgrad_seconds if backward else block.forward_seconds) - block.output_seconds


def pass_times(
    blocks: Sequence[SubBlockTime],
    wire: WireModel,
    token_contention: float,
    schedule: Schedule,
    recompute: bool,
) -> tuple[PassTime, PassTime]:
    """Return the times of a forward and a backward pass; `token_contention` is that of all-to-alls."""

    def time(events: Sequence[Event], backward: bool) -> PassTime:
        clock = SimulatedClock(wire)
        late = schedule.late_weight_gradients
        activities = [*play(events, blocks, clock, token_contention, late, backward)]
        waited = sum(end - start for event, start, end in activities if event and event.action == "wait")
        on_wire = sum(_wire_seconds(blocks[place], what) for action, what, place in events if action == "launch")
        return PassTime(clock.now, on_wire, 1 - waited / on_wire if on_wire else 1.0)

    forward = forward_events(blocks, schedule)
    gathered = [position for position, block in enumerate(blocks) if block.read_seconds and not block.moves_tokens]
    backward = backward_events(forward, range(len(blocks)) if recompute else gathered, recompute)
    return time(forward, backward=False), time(backward, backward=True)
