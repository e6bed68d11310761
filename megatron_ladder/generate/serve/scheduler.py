"""Scheduling: rank 0 assigns samples to slots, and broadcasts a plan before each step, which all ranks then run.

Only the engine's thread uses the scheduler's state. Other threads and signal handlers put calls into its inbox, which
the engine's thread makes before it plans a step.

A plan says which slots to release and which requests to admit. It is one broadcast of a few hundred bytes:

    bytes 0 .. 7    length of the plan's MessagePack, little-endian; 0 for a plan without changes
    bytes 8 ..      the MessagePack; the part that does not fit follows in a second broadcast

The broadcast uses gloo on every device, because ranks that wait for a gloo message sleep.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec
import torch

from megatron_ladder.comm.group import CommGroup
from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.slots import SlotBatch

PREFILL_TOKENS = 2048
"""Prompt tokens, with padding, to admit in one step, because running samples wait for the prefill. A single longer
prompt is admitted alone."""
HEARTBEAT_SECONDS = 10.0
"""Longest interval between two plans, so that the other ranks do not time out."""
PLAN_TIMEOUT = timedelta(minutes=5)
"""Timeout of a rank that waits for a plan: many heartbeats, or one long prompt."""
_LENGTH_BYTES, _FIRST_BYTES = 8, 504
"""Bytes of the first broadcast: the length, and the beginning of the MessagePack."""


@dataclass(frozen=True)
class StepPlan:
    """Changes before one step; the default continues with the samples that are in the slots."""

    release: tuple[int, ...] = ()
    """Slots whose samples were cancelled."""
    admit: dict[int, GenerationRequest] = field(default_factory=dict)
    """New requests by slot."""
    stop: bool = False


@dataclass(frozen=True, eq=False)
class Ticket:
    """A sample that a client waits for."""

    request: GenerationRequest
    on_event: "Callable[[Event], None]"
    """Called in the server's thread."""


class Aborted(NamedTuple):
    """Last event of a ticket that does not finish; `status` is that of the response."""

    reason: str
    status: int = 503
    param: str | None = None


Event = NewToken | Aborted
_FAILURES: dict[str | None, Event] = {
    "bad numbers": Aborted("the model's numbers overflow for this prompt: its logits are not finite", 500),
    "failed grammar": Aborted(
        "response_format: no token can continue the answer. The schema needs characters that the vocabulary lacks, or "
        "is too complex; use fewer optional properties or smaller patterns",
        400,
        "response_format",
    ),
}
"""Events of samples that end without a token, by reason."""
Deliver = Callable[[Sequence[tuple[Ticket, Event]]], None]


class Scheduler:
    """Puts tickets into slots, in order of arrival, as slots become free. Exists on rank 0."""

    def __init__(self, slots: int, deliver: Deliver, grace_seconds: float) -> None:
        """`deliver` passes events to the server's thread; `stop` aborts samples only after the grace period."""
        self._deliver = deliver
        self._grace_seconds = grace_seconds
        # A signal handler can call `put` while the interrupted thread is within `get`; SimpleQueue allows that.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: deque[Ticket] = deque()
        self._in_slots: list[Ticket | None] = [None] * slots
        self._cancelled: list[int] = []
        self._deadline: float | None = None
        self._closed = False
        self._error: BaseException | None = None

    @property
    def running(self) -> int:
        """Number of samples in slots."""
        return sum(ticket is not None for ticket in self._in_slots)

    @property
    def waiting(self) -> int:
        """Number of samples that wait for a slot."""
        return len(self._waiting)

    def submit(self, ticket: Ticket) -> None:
        """Queue a sample; from any thread."""
        self._inbox.put(lambda: self._waiting.append(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Drop a sample that nobody waits for any longer, unless it is finished; from any thread."""

        def drop() -> None:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif ticket in self._in_slots:
                slot = self._in_slots.index(ticket)
                self._in_slots[slot] = None
                self._cancelled.append(slot)

        self._inbox.put(drop)

    def stop(self) -> None:
        """Abort samples after the grace period, or at once when called again; from any thread or signal handler."""

        def set_deadline() -> None:
            grace = self._grace_seconds if self._deadline is None else 0.0
            self._deadline = time.monotonic() + grace

        self._inbox.put(set_deadline)

    def close(self, error: BaseException | None = None) -> None:
        """Let the next plan stop, or raise the error; from any thread."""

        def end() -> None:
            self._closed, self._error = True, error

        self._inbox.put(end)

    def next_plan(self) -> StepPlan:
        """Return the plan of the next step; an idle scheduler waits for a call, but not longer than a heartbeat."""
        with contextlib.suppress(Empty):
            if not self.running and not self._waiting:
                self._inbox.get(timeout=HEARTBEAT_SECONDS)()
            while True:
                self._inbox.get_nowait()()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.abort_all("the server is shutting down")
        if self._closed:
            if self._error is not None:
                raise self._error
            return StepPlan(stop=True)
        cancelled, self._cancelled = tuple(self._cancelled), []
        admitted: dict[int, GenerationRequest] = {}
        longest = 0
        for slot, ticket in enumerate(self._in_slots):
            if ticket is not None or not self._waiting:
                continue
            request = self._waiting[0].request
            longest = max(longest, len(request.prompt_ids))
            if admitted and longest * (len(admitted) + 1) > PREFILL_TOKENS:
                break
            self._in_slots[slot] = self._waiting.popleft()
            admitted[slot] = request
        return StepPlan(cancelled, admitted)

    def deliver(self, tokens: Sequence[NewToken]) -> None:
        """Pass the tokens of a step to the server's thread."""
        events: list[tuple[Ticket, Event]] = []
        for token in tokens:
            ticket = self._in_slots[token.sample]
            assert ticket is not None
            events.append((ticket, _FAILURES.get(token.finish_reason, token)))
            if token.finish_reason is not None:
                self._in_slots[token.sample] = None
        self._deliver(events)

    def abort_all(self, reason: str) -> None:
        """Abort all samples."""
        aborted = [ticket for ticket in (*self._in_slots, *self._waiting) if ticket is not None]
        self._cancelled += [slot for slot, ticket in enumerate(self._in_slots) if ticket is not None]
        self._in_slots = [None] * len(self._in_slots)
        self._waiting.clear()
        self._deliver([(ticket, Aborted(reason)) for ticket in aborted])


def _share_plan(group: CommGroup, plan: StepPlan | None) -> StepPlan:
    """Return rank 0's plan on every rank of a gloo group; the other ranks pass None."""
    if group.size == 1:
        assert plan is not None
        return plan
    packed = b"" if plan is None or plan == StepPlan() else msgspec.msgpack.encode(plan)
    first = bytearray(len(packed).to_bytes(_LENGTH_BYTES, "little") + packed[:_FIRST_BYTES].ljust(_FIRST_BYTES))
    group.broadcast(torch.frombuffer(first, dtype=torch.uint8))
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    rest = bytearray(packed[_FIRST_BYTES:] or max(0, length - _FIRST_BYTES))
    if rest:
        group.broadcast(torch.frombuffer(rest, dtype=torch.uint8))
    if plan is not None:
        return plan
    found = first[_LENGTH_BYTES:][:length] + rest
    return msgspec.msgpack.decode(found, type=StepPlan) if found else StepPlan()


def run_plans(
    batch: SlotBatch,
    group: CommGroup,
    next_plan: Callable[[], StepPlan] | None = None,
    on_tokens: Callable[[Sequence[NewToken]], None] | None = None,
) -> None:
    """Run the steps of rank 0's plans until one stops; every rank must call it, with the gloo group of all.

    `next_plan` may wait for a plan; it is None on other ranks. `on_tokens` receives each step's tokens on rank 0,
    before slots are released. Raises BadNumbersError on every rank if the model's logits are not finite for any
    input.
    """

    def take(tokens: Sequence[NewToken]) -> None:
        if on_tokens is not None:
            on_tokens(tokens)
        for token in tokens:
            if token.finish_reason is not None:
                batch.release(token.sample)

    while True:
        plan = _share_plan(group, None if next_plan is None else next_plan())
        if plan.stop:
            return
        for slot in plan.release:
            batch.release(slot)
        if plan.admit:
            take(batch.admit(plan.admit))
        if batch.is_busy():
            take(batch.step())
