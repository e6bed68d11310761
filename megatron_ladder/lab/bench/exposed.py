"""Communication that nothing hides, from a trace of training steps (`--profile`).

A trace has the steps (`iteration 12`), the sub-blocks (`layers.3.attention forward`, `norm forward`, `backward`, `norm
backward`, `gather`, `recompute`) and the collectives by name (`comm/spans.py`). What is exposed depends on the device:

    CPU     the time inside waits, and inside collectives that are waited for at once
    CUDA    the time in which a communication kernel runs and no other kernel, copy or fill does:

        compute   [ h_0 ][ h_1      ]      [ h_2 ...
        NCCL             [ y_0         ]
                                    ^^^  exposed

A moment in which two communication kernels run counts once, for the one that began first. The communication of a
sub-block is what it started: the reduce of its output in forward, and of its input's gradient in backward. A kernel
that waits for a rank which is late counts as communication too.

Times inside this file are a trace's own, microseconds; results are in seconds.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from megatron_ladder.errors import UserError

T = TypeVar("T")
Event = dict[str, Any]
"""Of Chrome's trace format, complete (`"ph": "X"`)."""
Device = Literal["cpu", "cuda"]

ELSEWHERE = "outside of sub-blocks"
"""The embedding, the head, the loss, and data-parallel reduces."""
COMMUNICATION_KERNELS = r"nccl|(one|two)_shot_all_reduce|multimem"
"""Names of kernels that communicate: NCCL's, and those of torch's symmetric memory."""

_STEP = re.compile(r"iteration (\d+)")
_SUB_BLOCK = re.compile(r"(layers\.\d+\.\w+) (forward|norm forward|backward|norm backward|gather|recompute)")
_COLLECTIVE = re.compile(r"(all_reduce|all_gather|reduce_scatter|broadcast)(?: (start|wait))?")
_AUTOGRAD = "autograd::engine::evaluate_function"
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MICROSECOND = 1e-6
_NESTING = 4
"""More names than lie in that of another sub-block: its neighbour's norm and gathers run while it is halfway."""


class Interval(NamedTuple):
    """A stretch of time."""

    start: float
    stop: float


class Owner(NamedTuple):
    """Whose communication it is."""

    name: str
    """`layers.3.attention`, or `ELSEWHERE`."""
    direction: str
    """forward or backward; "" elsewhere."""


class Collective(NamedTuple):
    """One collective of this rank."""

    owner: Owner
    iteration: int
    in_flight_seconds: float
    """CPU: from its start to the end of its wait. CUDA: of its kernel."""
    exposed_seconds: float


@dataclass(frozen=True)
class Communication:
    """What a trace tells."""

    device: Device
    step_seconds: dict[int, float]
    """Iteration -> how long the step took."""
    collectives: tuple[Collective, ...]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, ascending."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1].stop:
            merged[-1] = Interval(merged[-1].start, max(merged[-1].stop, stop))
        else:
            merged.append(Interval(start, stop))
    return merged


def uncovered(interval: Interval, cover: Sequence[Interval]) -> float:
    """How much of an interval lies outside of `cover`, which is disjoint and ascending."""
    if interval.start >= interval.stop:
        return 0.0
    total = interval.stop - interval.start
    for index in range(max(0, bisect_right(cover, interval) - 1), len(cover)):
        if cover[index].start >= interval.stop:
            break
        total -= max(0.0, min(interval.stop, cover[index].stop) - max(interval.start, cover[index].start))
    return total


def read_events(path: Path) -> list[Event]:
    """The complete events of a trace, gzipped or not.

    Raises:
        UserError: it cannot be read, or is no trace.
    """
    try:
        content = path.read_bytes()
        trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        return [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}: give a file that --profile has written") from None
    except (ValueError, EOFError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: no trace in JSON: give a file that --profile has written") from None


def communication(events: Sequence[Event], kernels: str = COMMUNICATION_KERNELS) -> Communication:
    """All collectives of the steps in a trace.

    Args:
        kernels: regular expression for the names of kernels that communicate.

    Raises:
        ValueError: there is no step in it.
    """
    names = _Names(events)
    if not names.steps:
        raise ValueError("no step has a name in it")
    on_device = [event for event in events if event.get("cat") in _DEVICE_WORK]
    found = _of_kernels(events, on_device, names, re.compile(kernels)) if on_device else _of_waits(events, names)
    seconds = {number: (span.stop - span.start) * _MICROSECOND for span, number in names.steps}
    return Communication("cuda" if on_device else "cpu", seconds, tuple(found))


class _Names:
    """Which step and which sub-block a moment of a thread belongs to."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.steps: list[tuple[Interval, int]] = []
        self._sub_blocks: dict[Any, list[tuple[Interval, Owner]]] = defaultdict(list)
        self._backward_nodes: dict[Any, list[tuple[Interval, int]]] = defaultdict(list)
        operators: list[tuple[Event, int]] = []
        for event in events:
            if event.get("cat") == "user_annotation":
                self._add(event)
            sequence = event.get("args", {}).get("Sequence number", -1)
            if sequence >= 0 and event["name"].startswith(_AUTOGRAD):
                self._backward_nodes[event["tid"]].append((_interval(event), sequence))
            elif sequence >= 0:
                operators.append((event, sequence))
        self.steps.sort()
        for named in self._sub_blocks.values():
            named.sort()
        for nodes in self._backward_nodes.values():
            nodes.sort()
        self._forward_of: dict[int, str] = {}
        for event, sequence in operators:
            owner = self._sub_block_at(event["ts"], event["tid"])
            if owner is not None and owner.direction == "forward":
                self._forward_of[sequence] = owner.name

    def _add(self, event: Event) -> None:
        step, sub_block = _STEP.fullmatch(event["name"]), _SUB_BLOCK.fullmatch(event["name"])
        if step:
            self.steps.append((_interval(event), int(step[1])))
        elif sub_block:
            owner = Owner(sub_block[1], "forward" if sub_block[2].endswith("forward") else "backward")
            self._sub_blocks[event["tid"]].append((_interval(event), owner))

    def step_at(self, moment: float) -> int | None:
        """The step that a moment lies in."""
        return _around(moment, self.steps, nesting=1)

    def owner_at(self, moment: float, thread: Any) -> Owner:
        """The sub-block of what a thread does at a moment.

        Where autograd walks backward by itself, nothing has a name; its nodes carry the numbers of the operators that
        made them.
        """
        named = self._sub_block_at(moment, thread)
        if named is not None:
            return named
        nodes = self._backward_nodes.get(thread, [])
        sequence = _around(moment, nodes, nesting=len(nodes))
        name = None if sequence is None else self._forward_of.get(sequence)
        return Owner(ELSEWHERE, "") if name is None else Owner(name, "backward")

    def _sub_block_at(self, moment: float, thread: Any) -> Owner | None:
        return _around(moment, self._sub_blocks.get(thread, []), _NESTING)


def _of_waits(events: Sequence[Event], names: _Names) -> list[Collective]:
    """On a CPU. Collectives of a kind are waited for in the order in which they were started."""
    found = []
    started: dict[str, deque[tuple[Owner, float]]] = defaultdict(deque)
    for event in sorted(events, key=lambda event: event["ts"]):
        match = _COLLECTIVE.fullmatch(event["name"]) if event.get("cat") == "user_annotation" else None
        iteration = names.step_at(event["ts"])
        if match is None or iteration is None:
            continue
        operation, what = match.groups()
        owner, begin = names.owner_at(event["ts"], event["tid"]), float(event["ts"])
        if what == "start":
            started[operation].append((owner, begin))
            continue
        if what == "wait" and started[operation]:
            owner, begin = started[operation].popleft()
        span = _interval(event)
        found.append(
            Collective(
                owner, iteration, (span.stop - begin) * _MICROSECOND, (span.stop - span.start) * _MICROSECOND
            )
        )
    return found


def _of_kernels(
    events: Sequence[Event], on_device: Sequence[Event], names: _Names, kernels: re.Pattern[str]
) -> list[Collective]:
    """On CUDA. A kernel belongs to the step and the sub-block that launched it."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    communicating = [event for event in on_device if kernels.search(event["name"])]
    apart = {id(event) for event in communicating}
    cover = union(_interval(event) for event in on_device if id(event) not in apart)
    found, counted_until = [], 0.0
    for event in sorted(communicating, key=lambda event: event["ts"]):
        span = _interval(event)
        exposed = uncovered(Interval(max(span.start, counted_until), span.stop), cover)
        counted_until = max(counted_until, span.stop)
        launch = launches.get(event.get("args", {}).get("correlation"), event)
        iteration = names.step_at(launch["ts"])
        if iteration is not None:
            owner = names.owner_at(launch["ts"], launch["tid"])
            found.append(
                Collective(owner, iteration, (span.stop - span.start) * _MICROSECOND, exposed * _MICROSECOND)
            )
    return found


def _interval(event: Event) -> Interval:
    return Interval(float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)))


def _around(moment: float, entries: Sequence[tuple[Interval, T]], nesting: int) -> T | None:
    """What belongs to the innermost interval around a moment.

    Args:
        entries: their intervals ascend.
        nesting: how many of them are looked at, from the one that began last before the moment.
    """
    last = bisect_right(entries, moment, key=lambda entry: entry[0].start)
    for span, belonging in reversed(entries[max(0, last - nesting) : last]):
        if span.stop > moment:
            return belonging
    return None
