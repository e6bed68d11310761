"""Time of a step of a wiring on a wire.

The step-time model walks the same list of sub-blocks by the same plan as the model does (a sub-block waits for the
outputs that it is the first to see), but it advances a clock instead of computing. It assumes that all ranks behave the
same, and simulates one. docs/concepts.md has the closed forms for a layer.

On a pipelined wire s + 1 sub-blocks of staleness s finish within one c + t: the all-reduce of a sub-block starts when
the sub-block ends, and the sub-block s + 1 positions later is the first to wait for it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ladder.blueprint.wiring import ReadPlan

MICROSECOND = 1e-6
KILOBYTE = 2**10
MEGABYTE = 2**20
"""Tensor sizes are binary."""
GIGABYTE_PER_SECOND = 1e9
"""Rates are decimal, as in data sheets."""


def wire_bytes(num_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank of a ring sends for an all-reduce: 2 (n - 1)/n S."""
    return 2 * (ranks - 1) / ranks * num_bytes


CONTENTION = 0.57
"""Largest compute share lost to a collective, per `gpu_contention`."""


def gpu_contention(num_bytes: float, largest: float = CONTENTION) -> float:
    """Return the share of an overlap given back because a collective takes multiprocessors: 0.57 S / (S + 0.33 MB).

    It is from the fit in `machines.py`. 0.03 at 16 KB; a collective bounded in multiprocessors gives back about 0.2.
    """
    return largest * num_bytes / (num_bytes + 0.33 * MEGABYTE)


@dataclass(frozen=True)
class SubBlockTime:
    """Seconds that one sub-block takes on a rank.

    `reduce_seconds` is the wire time of the all-reduce of its output, and of its input gradient, which has the same
    size. `missing` are the outputs that the stream lacks when it starts, counted back from the newest. Backward is
    split into the gradient of its input and the rest: the gradients of its weights, which no other sub-block needs.
    Outputs and readings can share the all-reduce of a neighbour, as in `WiredSubBlock`. The last four matter only next
    to divided experts (`divided_experts.py`).
    """

    forward_seconds: float
    reduce_seconds: float
    missing: tuple[int, ...] = ()
    dgrad_seconds: float = 0.0
    wgrad_seconds: float = 0.0
    joins_next: bool = False
    shares_input: bool = False
    read_seconds: float = 0.0
    """Wire time of its input: a gather, or for routed experts the dispatch; `reduce_seconds` is then the combine."""
    moves_tokens: bool = False
    """Whether tokens travel to the ranks of their experts."""
    output_seconds: float = 0.0
    """The part of forward in its output projection, which takes as long in the gradient of the input."""
    output_wgrad_seconds: float = 0.0
    """The time of the weight gradients that are not in `wgrad_seconds`; they are not part of `dgrad_seconds`."""


def join_intervals(steps: Sequence[SubBlockTime], interval: int) -> Sequence[SubBlockTime]:
    """Return the sub-blocks of each interval of desynchronised streams as one, with one reduce; 0: `steps` as it is."""
    if not interval:
        return steps
    return [
        SubBlockTime(
            sum(sub_block.forward_seconds for sub_block in joined),
            joined[0].reduce_seconds,
            dgrad_seconds=sum(sub_block.dgrad_seconds for sub_block in joined),
            wgrad_seconds=sum(sub_block.wgrad_seconds for sub_block in joined),
        )
        for joined in (steps[start : start + interval] for start in range(0, len(steps), interval))
    ]


@dataclass(frozen=True)
class WireModel:
    """How collectives of one rank share the wire, and their cost on the processor.

    On a serial wire a collective starts only when the previous one has ended. Starting one and waiting for it take
    compute time; the latter overlaps with the wire if the collective is not done. `contention` is the compute time lost
    per second of overlap with the wire: max(c, t) + contention min(c, t).
    """

    serial: bool = True
    launch_seconds: float = 0.0
    finish_seconds: float = 0.0
    contention: float = 0.0


@dataclass(slots=True, eq=False)
class SimulatedCollective:
    """A launched collective."""

    seconds_left: float
    group: str
    contention: float


class SimulatedClock:
    """The time of one rank, which computes or waits while collectives advance.

    A subclass can record computation by overriding `compute`, and the wire's activity by overriding `advance`.
    """

    def __init__(self, wire: WireModel) -> None:
        self.wire = wire
        self.now = 0.0
        self._in_flight: list[SimulatedCollective] = []

    def launch(self, seconds: float, group: str = "", contention: float | None = None) -> SimulatedCollective:
        """Start a collective of a group; each group has its own wire. `contention` is the wire's by default."""
        self.compute(self.wire.launch_seconds)
        collective = SimulatedCollective(seconds, group, self.wire.contention if contention is None else contention)
        self._in_flight.append(collective)
        return collective

    def compute(self, seconds: float) -> None:
        """Compute for this long, and longer with contention."""
        while seconds > 0:
            moving = self._moving()
            if not moving:
                self.now += seconds
                return
            overlapped = min(seconds, *(each.seconds_left for each in moving))
            seconds -= overlapped
            self.advance(moving, overlapped)
            self.now += max(each.contention for each in moving) * overlapped

    def wait(self, collective: SimulatedCollective) -> None:
        """Wait until `collective` is done."""
        self.compute(self.wire.finish_seconds)
        while collective.seconds_left > 0:
            moving = self._moving()
            self.advance(moving, min(each.seconds_left for each in moving))

    def _moving(self) -> list[SimulatedCollective]:
        """Drop finished collectives, and return those that the wire carries now."""
        self._in_flight = [each for each in self._in_flight if each.seconds_left > 0]
        if self.wire.serial:
            first = {each.group: each for each in reversed(self._in_flight)}
            return [*first.values()]
        return self._in_flight

    def advance(self, moving: Sequence[SimulatedCollective], seconds: float) -> None:
        """Let the wire carry `moving` for this long."""
        self.now += seconds
        for each in moving:
            each.seconds_left -= seconds


def forward_seconds(
    sub_blocks: Sequence[SubBlockTime],
    wire: WireModel,
    head_seconds: float = 0.0,
    *,
    clock: SimulatedClock | None = None,
) -> float:
    """Return the time of a forward pass: the sub-blocks by the rule, the final waits, then the head.

    The head is everything after the last output has arrived, including exposed collectives. `clock` is a clock of the
    same wire, for callers that need more than the total.
    """
    clock = SimulatedClock(wire) if clock is None else clock
    plan = ReadPlan.of(block.missing for block in sub_blocks)
    launched: dict[int, SimulatedCollective] = {}

    def wait_for(outputs: Iterable[int]) -> None:
        for output in outputs:
            if output in launched:
                clock.wait(launched[output])

    for index, block in enumerate(sub_blocks):
        wait_for(plan.arriving(index))
        clock.compute(block.forward_seconds)
        if not block.joins_next:
            launched[index] = clock.launch(block.reduce_seconds)
    wait_for(plan.arriving(len(sub_blocks)))
    clock.compute(head_seconds)
    return clock.now


def backward_seconds(
    sub_blocks: Sequence[SubBlockTime],
    wire: WireModel,
    *,
    launch_before_wgrad: bool = False,
    wait_at_once: bool = False,
    clock: SimulatedClock | None = None,
) -> float:
    """Return the time of a backward pass, the mirror of the forward pass.

    The gradient of sub-block j's output is the gradient of the stream at the point where the output is added. So the
    backward of j needs the reduced input gradient of every later sub-block that read a stream with this output in it.
    The others can be in flight: for ladder that of j + 1, for standard none.

    Args:
        launch_before_wgrad: launch the reduce as soon as the input gradient is ready, so that it overlaps with the
            weight-gradient product (for the standard wiring, Megatron's overlap); otherwise launch it after both.
        wait_at_once: wait for each reduce before the next backward, whatever the wiring allows, as autograd does with
            collectives that are only asynchronous.
    """
    clock = SimulatedClock(wire) if clock is None else clock
    arrivals = ReadPlan.of(block.missing for block in sub_blocks).arrivals
    in_flight: deque[tuple[int, SimulatedCollective]] = deque()
    for index in reversed(range(len(sub_blocks))):
        block = sub_blocks[index]
        while in_flight and in_flight[0][0] >= arrivals[index]:
            clock.wait(in_flight.popleft()[1])
        if block.shares_input and not wait_at_once:
            clock.compute(block.dgrad_seconds + block.wgrad_seconds)
            continue
        clock.compute(block.dgrad_seconds if launch_before_wgrad else block.dgrad_seconds + block.wgrad_seconds)
        reduce = clock.launch(block.reduce_seconds)
        if launch_before_wgrad:
            clock.compute(block.wgrad_seconds)
        if wait_at_once:
            clock.wait(reduce)
        else:
            in_flight.append((index, reduce))
    while in_flight:
        clock.wait(in_flight.popleft()[1])
    return clock.now
