"""Assigns samples to slots and plans the steps, on rank 0.

Only the engine's thread uses the scheduler's state. Other threads and signal handlers put messages into its inbox.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.serve.plans import HEARTBEAT_SECONDS, StepPlan

PREFILL_TOKENS = 2048
"""Prompt tokens, with padding, to admit in one step, because running samples wait for the prefill. A single longer
prompt is admitted alone."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """A sample that a client waits for."""

    request: GenerationRequest
    on_event: "Callable[[Event], None]"
    """Called in the server's thread."""


class Aborted(NamedTuple):
    """Last event of a ticket that does not finish."""

    reason: str


Event = NewToken | Aborted
Deliver = Callable[[Sequence[tuple[Ticket, Event]]], None]


class _Cancel(NamedTuple):
    ticket: Ticket


class _Stop(NamedTuple):
    """Stop after the grace period; a second one stops at once."""


class _Closed(NamedTuple):
    """No more messages follow."""

    error: BaseException | None


class Scheduler:
    """Puts tickets into slots, in order of arrival, as slots become free."""

    def __init__(self, slots: int, deliver: Deliver, grace_seconds: float) -> None:
        """
        Args:
            deliver: passes events to the server's thread.
            grace_seconds: time from `stop` until unfinished samples are aborted.
        """
        self._deliver = deliver
        self._grace_seconds = grace_seconds
        # A signal handler can call `put` while the interrupted thread is within `get`; SimpleQueue allows that.
        self._inbox: SimpleQueue[Ticket | _Cancel | _Stop | _Closed] = SimpleQueue()
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
        self._inbox.put(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Drop a sample that nobody waits for any longer, unless it is finished; from any thread."""
        self._inbox.put(_Cancel(ticket))

    def stop(self) -> None:
        """Abort unfinished samples after the grace period, or at once when called again; from any thread or signal
        handler."""
        self._inbox.put(_Stop())

    def close(self, error: BaseException | None = None) -> None:
        """Send the last message: the next plan stops, or raises the error; from any thread."""
        self._inbox.put(_Closed(error))

    def next_plan(self) -> StepPlan:
        """Return the plan of the next step; an idle scheduler waits for a message, but not longer than a heartbeat."""
        wait = HEARTBEAT_SECONDS if not self.running and not self._waiting else 0.0
        while True:
            try:
                message = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
            except Empty:
                break
            wait = 0.0
            self._handle(message)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.abort_all("the server is shutting down")
        if self._closed:
            if self._error is not None:
                raise self._error
            return StepPlan(stop=True)
        cancelled, self._cancelled = tuple(self._cancelled), []
        return StepPlan(cancelled, self._admit())

    def deliver(self, tokens: Sequence[NewToken]) -> None:
        """Pass the tokens of a step to the server's thread."""
        events: list[tuple[Ticket, Event]] = []
        for token in tokens:
            ticket = self._in_slots[token.sample]
            assert ticket is not None
            events.append((ticket, token))
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

    def _handle(self, message: Ticket | _Cancel | _Stop | _Closed) -> None:
        match message:
            case Ticket():
                self._waiting.append(message)
            case _Cancel(ticket):
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                elif ticket in self._in_slots:
                    slot = self._in_slots.index(ticket)
                    self._in_slots[slot] = None
                    self._cancelled.append(slot)
            case _Stop():
                grace = self._grace_seconds if self._deadline is None else 0.0
                self._deadline = time.monotonic() + grace
            case _Closed(error):
                self._closed, self._error = True, error

    def _admit(self) -> dict[int, GenerationRequest]:
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
        return admitted
