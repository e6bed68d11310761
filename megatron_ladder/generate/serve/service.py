"""What the server's thread knows: who may ask, how much is under way, and what has been answered."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.generate.requests import NewToken
from megatron_ladder.generate.serve.answers import Choice
from megatron_ladder.generate.serve.metrics import Metrics
from megatron_ladder.generate.serve.questions import ApiError, Question, Rules
from megatron_ladder.generate.serve.scheduler import Ended, Event, Scheduler, Ticket


@dataclass(frozen=True)
class Limits:
    """Of one server."""

    outstanding: int
    """Samples in slots and waiting for one."""
    body_bytes: int
    """Of one request."""
    body_seconds: float = 30.0
    """Until a body must be there."""


class Service:
    """Between HTTP and the scheduler. All methods are called in the server's thread.

    Attributes:
        refusing: whether new requests are refused because the server ends; set by any thread.
    """

    def __init__(
        self, scheduler: Scheduler, rules: Rules, tokenizer: Tokenizer, limits: Limits, api_keys: Sequence[bytes]
    ) -> None:
        """`api_keys`: a request must have one of them; without any, none is needed."""
        self.scheduler, self.rules, self.tokenizer, self.limits = scheduler, rules, tokenizer, limits
        self.metrics = Metrics()
        self.refusing = False
        self.started = int(time.time())
        self._api_keys = api_keys
        self._outstanding = 0
        # One thread: tokenizers need not bear several, and a long text must not hold up the streams.
        self._reader = ThreadPoolExecutor(1, "reader")

    def allows(self, authorization: bytes) -> bool:
        """Whether the header of that name has a key that opens this server."""
        if not self._api_keys:
            return True
        kind, _, key = authorization.partition(b" ")
        # Every key is compared, so that the time tells nothing of them.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._api_keys]
        return kind.lower() == b"bearer" and any(matches)

    async def read(self, read: Callable[[bytes, Rules], Question], body: bytes) -> Question:
        """Reads a body beside the streams; raises ApiError."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, read, body, self.rules)

    def gauges(self) -> dict[str, float]:
        """Values of the moment for /metrics."""
        return {"running_samples": self.scheduler.running, "waiting_samples": self.scheduler.waiting}

    def enter(self, samples: int) -> None:
        """Counts samples that come; raises ApiError when there is no room for them."""
        if self.refusing:
            raise ApiError(503, "the server is shutting down")
        if self._outstanding + samples > self.limits.outstanding:
            raise ApiError(
                429, f"{self._outstanding} samples are under way, of {self.limits.outstanding} that may be: try again",
                code="queue_full",
            )  # fmt: skip
        self._outstanding += samples

    def leave(self, samples: int) -> None:
        """Counts samples that are over."""
        self._outstanding -= samples


class Answer:
    """The samples of one request under way; an asynchronous context, after which nothing of it is left."""

    def __init__(self, service: Service, question: Question) -> None:
        """Raises ApiError when there is no room."""
        service.enter(len(question.samples))
        self._service = service
        self.choices = [Choice() for _ in question.samples]
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._begun = time.monotonic()
        self._closed = False
        self._tickets = [
            Ticket(request, partial(self._note, index)) for index, request in enumerate(question.samples)
        ]
        service.metrics.prompt_tokens += question.prompt_tokens
        for ticket in self._tickets:
            service.scheduler.submit(ticket)

    async def tokens(self) -> AsyncIterator[list[tuple[int, NewToken]]]:
        """All tokens with the number of their choice, those together that have come meanwhile.

        Raises:
            ApiError: the samples were given up.
        """
        while not all(choice.finished for choice in self.choices):
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            found = []
            for index, event in events:
                if isinstance(event, Ended):
                    raise ApiError(503, event.why)
                self.choices[index].tokens.append(event)
                found.append((index, event))
            yield found

    def close(self) -> None:
        """Frees the slots and places of samples that are under way; what comes of them from now on is passed over."""
        self._closed = True
        for ticket, choice in zip(self._tickets, self.choices, strict=True):
            if not choice.ended:
                self._service.metrics.cancelled_samples += 1
                self._service.scheduler.cancel(ticket)
                self._service.leave(1)

    def _note(self, index: int, event: Event) -> None:
        if self._closed:
            return
        metrics, choice = self._service.metrics, self.choices[index]
        if isinstance(event, Ended):
            metrics.cancelled_samples += 1
            choice.ended = True
        else:
            metrics.generated_tokens += 1
            if not choice.begun:
                choice.begun = True
                metrics.first_tokens += 1
                metrics.first_token_seconds += time.monotonic() - self._begun
            choice.ended = event.finish_reason is not None
        if choice.ended:
            # Not when all was sent: a client that does not read would keep others out.
            self._service.leave(1)
        self._events.put_nowait((index, event))
