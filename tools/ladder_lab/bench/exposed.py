"""Exposed communication, from a trace of training steps (`--profile`).

A trace names the steps (`iteration 12`), the sub-blocks (`layers.3.attention forward`, `norm forward`, `backward`,
`norm backward`, `output gradient`, `gather`, `recompute`) and the collectives (`comm/spans.py`). Exposed time depends
on the device:

    CPU     the time inside waits, and inside blocking collectives
    CUDA    the time in which a communication kernel runs and no other kernel, copy or fill does:

        compute   [ h_0 ][ h_1      ]      [ h_2 ...
        NCCL             [ y_0         ]
                                    ^^^  exposed

Time in which two communication kernels run counts once, for the first one. A sub-block owns the communication that it
started: the reduce of its output in forward, and of its input's gradient in backward, which has no names where autograd
schedules it. A kernel that waits for a late rank counts as communication too.

An all-to-all of tokens is a combine if it carries outputs of experts, or their gradients, and a dispatch if it carries
inputs, again in a repeated forward, or their gradients.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from megatron_ladder.errors import UserError

T = TypeVar("T")
Event = dict[str, Any]
"""A complete event (`"ph": "X"`) of Chrome's trace format; its times are in microseconds."""

ELSEWHERE = "outside of sub-blocks"
"""The embedding, the head, the loss, and data-parallel reduces."""
_STEP = re.compile(r"iteration (\d+)")
_SUB_BLOCK = re.compile(
    r"(layers\.\d+\.\w+) (forward|norm forward|backward|norm backward|output gradient|gather|recompute)"
)
_COLLECTIVE = re.compile(
    r"((?:data |counts )?(?:all_reduce|all_gather|reduce_scatter|all_to_all|broadcast))(?: (start|wait)( \d+)?)?"
)
_COMBINES = ("forward", "output gradient")
"""Activities of experts that start to send outputs, or their gradients."""
_UNNAMED = "unnamed"
"""A collective that no group names."""
_KERNELS = re.compile("nccl|(one|two)_shot_all_reduce|multimem")
"""Names of communication kernels: NCCL's, and those of torch's symmetric memory."""
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_NESTING = 4
"""Largest nesting depth of names: a neighbour's norm and gathers run inside a sub-block."""
_NOWHERE = (ELSEWHERE, "", "")


class Communication(NamedTuple):
    """The communication found in a trace."""

    device: Literal["cpu", "cuda"]
    step_seconds: dict[int, float]
    collectives: pd.DataFrame
    """Columns name and direction of the sub-block that started it, collective, iteration, in_flight_seconds,
    exposed_seconds; in flight to the end of the wait on a CPU, and for the kernel's duration on CUDA."""


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


def communication(events: Sequence[Event]) -> Communication:
    """Find all collectives of the steps in a trace; raise ValueError if it contains no step."""
    names = _Names(events)
    if not names.steps:
        raise ValueError("it contains no training step")
    on_device = [event for event in events if event.get("cat") in _DEVICE_WORK]
    spans = _of_kernels(events, on_device) if on_device else _of_waits(events)
    rows = []
    for moment, thread, at, in_flight, exposed in spans:
        iteration = names.step_at(at)
        if iteration is not None:
            owner = names.launch_at(moment, thread)
            rows.append((*owner, iteration, in_flight * 1e-6, exposed * 1e-6))
    columns = ["name", "direction", "collective", "iteration", "in_flight_seconds", "exposed_seconds"]
    seconds = {number: (stop - start) * 1e-6 for start, stop, number in names.steps}
    return Communication("cuda" if on_device else "cpu", seconds, pd.DataFrame(rows, columns=columns))


class _Names:
    """Maps a time on a thread to step, sub-block and collective. Named spans are (start, stop, value), by thread."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.steps: list[tuple[float, float, int]] = []
        self._sub_blocks: dict[Any, list[tuple[float, float, tuple[str, str, str]]]] = defaultdict(list)
        self._collectives: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            if event.get("cat") != "user_annotation":
                continue
            name = event["name"]
            span = _span(event)
            if step := _STEP.fullmatch(name):
                self.steps.append((*span, int(step[1])))
            elif sub_block := _SUB_BLOCK.fullmatch(name):
                direction = "forward" if sub_block[2].endswith("forward") else "backward"
                self._sub_blocks[event["tid"]].append((*span, (sub_block[1], direction, sub_block[2])))
            elif collective := _COLLECTIVE.fullmatch(name):
                self._collectives[event["tid"]].append((*span, collective[1]))
                if name.startswith("data "):
                    self._sub_blocks[event["tid"]].append((*span, _NOWHERE))
        for entries in (self.steps, *self._sub_blocks.values(), *self._collectives.values()):
            entries.sort()  # type: ignore[attr-defined]

    def step_at(self, moment: float) -> int | None:
        return _around(moment, self.steps, nesting=1)

    def launch_at(self, moment: float, thread: Any) -> tuple[str, str, str]:
        """Return name and direction of the sub-block, and the collective."""
        name, direction, activity = _around(moment, self._sub_blocks.get(thread, []), _NESTING) or _NOWHERE
        collective = _around(moment, self._collectives.get(thread, []), nesting=1) or _UNNAMED
        if collective == "all_to_all" and activity:
            collective = "combine" if activity in _COMBINES else "dispatch"
        return name, direction, collective


_Collectives = Iterator[tuple[float, Any, float, float, float]]
"""Time and thread of a launch, the time that belongs to its step, and microseconds in flight and exposed."""


def _of_waits(events: Sequence[Event]) -> _Collectives:
    """Find collectives on a CPU. Those of a kind without numbers are waited for in the order of their starts."""
    started: dict[tuple[str, str | None], deque[Event]] = defaultdict(deque)
    for event in sorted(events, key=lambda event: event["ts"]):
        match = _COLLECTIVE.fullmatch(event["name"]) if event.get("cat") == "user_annotation" else None
        if match is not None and match[2] == "start":
            started[match[1], match[3]].append(event)
        elif match is not None:
            # A blocking collective is its own launch.
            launches = started[match[1], match[3]]
            launch = launches.popleft() if match[2] and launches else event
            start, stop = _span(event)
            yield launch["ts"], launch["tid"], start, stop - launch["ts"], stop - start


def _of_kernels(events: Sequence[Event], on_device: Sequence[Event]) -> _Collectives:
    """Find collectives on CUDA. A kernel belongs to the step and the sub-block that launched it."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    communicating: list[Event] = []
    computations: list[Event] = []
    for event in on_device:
        if _KERNELS.search(event["name"]):
            communicating.append(event)
        else:
            computations.append(event)
    computing = np.array(sorted(map(_span, computations)) or [(0.0, 0.0)])
    # Where computation ends so far; a gap before the next start is not covered.
    ends = np.maximum.accumulate(computing[:, 1])
    starts = np.maximum(computing[:, 0], np.concatenate([[-np.inf], ends[:-1]]))
    covered = np.cumsum(np.maximum(0.0, ends - starts))
    times = np.stack([starts, np.maximum(starts, ends)], 1).ravel()
    totals = np.repeat(covered, 2)
    totals[0::2] -= np.maximum(0.0, ends - starts)
    counted_until = 0.0
    for event in sorted(communicating, key=lambda event: event["ts"]):
        start, stop = _span(event)
        begin = min(max(start, counted_until), stop)
        exposed = stop - begin - float(np.diff(np.interp([begin, stop], times, totals))[0])
        counted_until = max(counted_until, stop)
        launch = launches.get(event.get("args", {}).get("correlation"), event)
        yield launch["ts"], launch["tid"], launch["ts"], stop - start, exposed


def _span(event: Event) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def _around(moment: float, entries: Sequence[tuple[float, float, T]], nesting: int) -> T | None:
    """Return the value of the innermost span around a time, among the last `nesting` that began before it."""
    last = bisect_right(entries, moment, key=lambda entry: entry[0])
    for _, stop, value in reversed(entries[max(0, last - nesting) : last]):
        if stop > moment:
            return value
    return None
