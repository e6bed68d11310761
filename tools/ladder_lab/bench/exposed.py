"""Exposed communication, from a trace of training steps (`--profile`).

A trace names the steps (`iteration 12`), the sub-blocks (`layers.3.attention forward`, `norm forward`, `backward`,
`norm backward`, `gather`, `recompute`) and the collectives (`comm/spans.py`). Exposed time depends on the device:

    CPU     the time inside waits, and inside blocking collectives
    CUDA    the time in which a communication kernel runs and no other kernel, copy or fill does:

        compute   [ h_0 ][ h_1      ]      [ h_2 ...
        NCCL             [ y_0         ]
                                    ^^^  exposed

Time in which two communication kernels run counts once, for the first one. A sub-block owns the communication that it
started: the reduce of its output in forward, and of its input's gradient in backward. A kernel that waits for a late
rank counts as communication too.

Times inside this file are in microseconds, as in the trace; results are in seconds.
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
"""A complete event (`"ph": "X"`) of Chrome's trace format."""

ELSEWHERE = "outside of sub-blocks"
"""The embedding, the head, the loss, and data-parallel reduces."""
COMMUNICATION_KERNELS = r"nccl|(one|two)_shot_all_reduce|multimem"
"""Names of communication kernels: NCCL's, and those of torch's symmetric memory."""

_STEP = re.compile(r"iteration (\d+)")
_SUB_BLOCK = re.compile(r"(layers\.\d+\.\w+) (forward|norm forward|backward|norm backward|gather|recompute)")
_COLLECTIVE = re.compile(r"((?:data )?(?:all_reduce|all_gather|reduce_scatter|broadcast))(?: (start|wait))?")
_AUTOGRAD = "autograd::engine::evaluate_function"
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MICROSECOND = 1e-6
_NESTING = 4
"""Largest nesting depth of names: a neighbour's norm and gathers run inside a sub-block."""


class _Interval(NamedTuple):
    start: float
    stop: float


class Owner(NamedTuple):
    """What started a collective: (`layers.3.attention`, forward or backward), or (`ELSEWHERE`, "")."""

    name: str
    direction: str


class TracedCollective(NamedTuple):
    """One collective of this rank. In flight: to the end of the wait on a CPU, the kernel's duration on CUDA."""

    owner: Owner
    iteration: int
    in_flight_seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Communication:
    """The communication found in a trace, and the duration of each iteration."""

    device: Literal["cpu", "cuda"]
    step_seconds: dict[int, float]
    collectives: tuple[TracedCollective, ...]


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Merge intervals into disjoint ones, ascending."""
    merged: list[_Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1].stop:
            merged[-1] = _Interval(merged[-1].start, max(merged[-1].stop, stop))
        else:
            merged.append(_Interval(start, stop))
    return merged


def _uncovered(interval: _Interval, cover: Sequence[_Interval]) -> float:
    """Return the length of an interval outside of `cover`, which is disjoint and ascending."""
    if interval.start >= interval.stop:
        return 0.0
    total = interval.stop - interval.start
    for index in range(max(0, bisect_right(cover, interval) - 1), len(cover)):
        if cover[index].start >= interval.stop:
            break
        total -= max(0.0, min(interval.stop, cover[index].stop) - max(interval.start, cover[index].start))
    return total


def read_events(path: Path) -> list[Event]:
    """Read the complete events of a trace, gzipped or not; raise UserError if the file is not a readable trace."""
    try:
        content = path.read_bytes()
        trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        return [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}: give a file written by --profile") from None
    except (ValueError, EOFError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not a trace in JSON: give a file written by --profile") from None


def communication(events: Sequence[Event], kernels: str = COMMUNICATION_KERNELS) -> Communication:
    """Find all collectives of the steps in a trace; raise ValueError if it contains no step.

    `kernels` is a regular expression for the names of communication kernels.
    """
    names = _Names(events)
    if not names.steps:
        raise ValueError("it contains no training step")
    on_device = [event for event in events if event.get("cat") in _DEVICE_WORK]
    found = _of_kernels(events, on_device, names, re.compile(kernels)) if on_device else _of_waits(events, names)
    seconds = {number: (span.stop - span.start) * _MICROSECOND for span, number in names.steps}
    return Communication("cuda" if on_device else "cpu", seconds, tuple(found))


class _Names:
    """Maps a time on a thread to its step and sub-block."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.steps: list[tuple[_Interval, int]] = []
        self._sub_blocks: dict[Any, list[tuple[_Interval, Owner]]] = defaultdict(list)
        self._backward_nodes: dict[Any, list[tuple[_Interval, int]]] = defaultdict(list)
        operators: list[tuple[Event, int]] = []
        for event in events:
            if event.get("cat") == "user_annotation":
                if step := _STEP.fullmatch(event["name"]):
                    self.steps.append((_interval(event), int(step[1])))
                elif sub_block := _SUB_BLOCK.fullmatch(event["name"]):
                    owner = Owner(sub_block[1], "forward" if sub_block[2].endswith("forward") else "backward")
                    self._sub_blocks[event["tid"]].append((_interval(event), owner))
                elif event["name"].startswith("data "):
                    self._sub_blocks[event["tid"]].append((_interval(event), Owner(ELSEWHERE, "")))
            sequence = event.get("args", {}).get("Sequence number", -1)
            if sequence >= 0 and event["name"].startswith(_AUTOGRAD):
                self._backward_nodes[event["tid"]].append((_interval(event), sequence))
            elif sequence >= 0:
                operators.append((event, sequence))
        named: list[list[Any]] = [self.steps, *self._sub_blocks.values(), *self._backward_nodes.values()]
        for entries in named:
            entries.sort()
        self._forward_of: dict[int, str] = {}
        for event, sequence in operators:
            named_owner = self._sub_block_at(event["ts"], event["tid"])
            if named_owner is not None and named_owner.direction == "forward":
                self._forward_of[sequence] = named_owner.name

    def step_at(self, moment: float) -> int | None:
        return _around(moment, self.steps, nesting=1)

    def owner_at(self, moment: float, thread: Any) -> Owner:
        # A backward run by autograd has no named sub-blocks; its nodes have the sequence numbers of forward operators.
        named = self._sub_block_at(moment, thread)
        if named is not None:
            return named
        nodes = self._backward_nodes.get(thread, [])
        sequence = _around(moment, nodes, nesting=len(nodes))
        name = None if sequence is None else self._forward_of.get(sequence)
        return Owner(ELSEWHERE, "") if name is None else Owner(name, "backward")

    def _sub_block_at(self, moment: float, thread: Any) -> Owner | None:
        return _around(moment, self._sub_blocks.get(thread, []), _NESTING)


def _of_waits(events: Sequence[Event], names: _Names) -> list[TracedCollective]:
    """Find collectives on a CPU. Collectives of a kind are waited for in the order of their starts."""
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
        start, stop = _interval(event)
        found.append(TracedCollective(owner, iteration, (stop - begin) * _MICROSECOND, (stop - start) * _MICROSECOND))
    return found


def _of_kernels(
    events: Sequence[Event], on_device: Sequence[Event], names: _Names, kernels: re.Pattern[str]
) -> list[TracedCollective]:
    """Find collectives on CUDA. A kernel belongs to the step and the sub-block that launched it."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    communicating: dict[bool, list[Event]] = {True: [], False: []}
    for event in on_device:
        communicating[kernels.search(event["name"]) is not None].append(event)
    cover = _union(map(_interval, communicating[False]))
    found, counted_until = [], 0.0
    for event in sorted(communicating[True], key=lambda event: event["ts"]):
        span = _interval(event)
        exposed = _uncovered(_Interval(max(span.start, counted_until), span.stop), cover)
        counted_until = max(counted_until, span.stop)
        launch = launches.get(event.get("args", {}).get("correlation"), event)
        iteration = names.step_at(launch["ts"])
        if iteration is not None:
            owner, seconds = names.owner_at(launch["ts"], launch["tid"]), (span.stop - span.start) * _MICROSECOND
            found.append(TracedCollective(owner, iteration, seconds, exposed * _MICROSECOND))
    return found


def _interval(event: Event) -> _Interval:
    return _Interval(float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)))


def _around(moment: float, entries: Sequence[tuple[_Interval, T]], nesting: int) -> T | None:
    """Return the value of the innermost interval around a time, among the last `nesting` that began before it."""
    last = bisect_right(entries, moment, key=lambda entry: entry[0].start)
    for span, belonging in reversed(entries[max(0, last - nesting) : last]):
        if span.stop > moment:
            return belonging
    return None
