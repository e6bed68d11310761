"""Who is next: from tickets that come and go at any time to the plans of the steps, on rank 0.

The engine's thread owns everything in here but the inbox, which other threads and signal handlers put messages into.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from megatron_ladder.generate.requests import GenerationRequest, NewToken
from megatron_ladder.generate.serve.plans import HEARTBEAT_SECONDS, Plan

PREFILL_TOKENS = 2048
"""Tokens of prompts, filled up to the longest, that are admitted in one step unless a single one has more: the samples
on their way wait for them."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """A sample that somebody waits for."""

    request: GenerationRequest
    on_event: "Callable[[Event], None]"
    """Called in the thread of the server."""


class Ended(NamedTuple):
    """A ticket's last event where it cannot be finished."""

    why: str


Event = NewToken | Ended
Deliver = Callable[[Sequence[tuple[Ticket, Event]]], None]


class _Cancel(NamedTuple):
    ticket: Ticket


class _Stop(NamedTuple):
    """Begin to end; a second one ends at once."""


class _Closed(NamedTuple):
    """No ticket will come any more."""

    error: BaseException | None


class Scheduler:
    """Tickets in order of arrival, into slots as they become free.

    Attributes:
        running: samples in slots.
        waiting: samples that wait for one.
    """

    def __init__(self, slots: int, deliver: Deliver, grace_seconds: float) -> None:
        """
        Args:
            deliver: hands events to the thread of the server.
            grace_seconds: from `stop` until what is not finished is ended.
        """
        self._deliver = deliver
        self._grace_seconds = grace_seconds
        # Its `put` may be called by a signal handler in the midst of its `get`.
        self._inbox: SimpleQueue[Ticket | _Cancel | _Stop | _Closed] = SimpleQueue()
        self._waiting: deque[Ticket] = deque()
        self._in_slots: list[Ticket | None] = [None] * slots
        self._gone: list[int] = []
        self._deadline: float | None = None
        self._closed = False
        self._error: BaseException | None = None

    @property
    def running(self) -> int:
        return sum(ticket is not None for ticket in self._in_slots)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, ticket: Ticket) -> None:
        """From any thread: a sample to generate."""
        self._inbox.put(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """From any thread: nobody waits for it any more. It may be finished."""
        self._inbox.put(_Cancel(ticket))

    def stop(self) -> None:
        """From any thread or signal handler: after the grace, end what is not finished; a second time, at once."""
        self._inbox.put(_Stop())

    def close(self, error: BaseException | None = None) -> None:
        """From any thread: the last message; the next plan says stop, or raises the error."""
        self._inbox.put(_Closed(error))

    def next_plan(self) -> Plan:
        """What to do in the next step; waits for something to do, but no longer than a heartbeat."""
        wait = HEARTBEAT_SECONDS if not self.running and not self._waiting else 0.0
        while True:
            try:
                message = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
            except Empty:
                break
            wait = 0.0
            self._take(message)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.end_all("the server is shutting down")
        if self._closed:
            if self._error is not None:
                raise self._error
            return Plan(stop=True)
        gone, self._gone = tuple(self._gone), []
        return Plan(gone, self._admit())

    def tell(self, tokens: Sequence[NewToken]) -> None:
        """Hands on the tokens of a step."""
        events: list[tuple[Ticket, Event]] = []
        for token in tokens:
            ticket = self._in_slots[token.sample]
            assert ticket is not None
            events.append((ticket, token))
            if token.finish_reason is not None:
                self._in_slots[token.sample] = None
        self._deliver(events)

    def end_all(self, why: str) -> None:
        """Gives up all tickets."""
        ended = [ticket for ticket in (*self._in_slots, *self._waiting) if ticket is not None]
        self._gone += [slot for slot, ticket in enumerate(self._in_slots) if ticket is not None]
        self._in_slots = [None] * len(self._in_slots)
        self._waiting.clear()
        self._deliver([(ticket, Ended(why)) for ticket in ended])

    def _take(self, message: Ticket | _Cancel | _Stop | _Closed) -> None:
        match message:
            case Ticket():
                self._waiting.append(message)
            case _Cancel(ticket):
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                elif ticket in self._in_slots:
                    slot = self._in_slots.index(ticket)
                    self._in_slots[slot] = None
                    self._gone.append(slot)
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
