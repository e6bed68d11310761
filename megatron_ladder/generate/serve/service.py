"""State of the server's thread: keys, limits, metrics, and the requests that are in progress."""

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.generate.requests import NewToken
from megatron_ladder.generate.serve.protocol import ApiError, ApiRequest, ServedModel
from megatron_ladder.generate.serve.responses import CompletionChoice
from megatron_ladder.generate.serve.scheduler import Aborted, Event, Scheduler, Ticket

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus's text format."""
_METRICS_PREFIX = "megatron_ladder_"


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of a server."""

    outstanding: int
    """Samples in slots and in the queue."""
    body_bytes: int
    """Size of a request's body."""
    body_seconds: float = 30.0
    """Time to receive a body."""


class _Metrics:
    """Counters of the server; only its thread uses them."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        """By path and status."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cancelled_samples = 0
        self.first_token_seconds = 0.0
        """Sum over all samples of the time to their first token."""
        self.first_tokens = 0

    def to_text(self, gauges: Mapping[str, float]) -> str:
        """Return all counters and the given gauges in Prometheus's text format."""
        prefix = _METRICS_PREFIX
        lines = [f"# TYPE {prefix}responses_total counter"]
        for (path, status), count in sorted(self.responses.items()):
            lines.append(f'{prefix}responses_total{{path="{path}",status="{status}"}} {count}')
        for name in ("prompt_tokens", "generated_tokens", "cancelled_samples"):
            lines += [f"# TYPE {prefix}{name}_total counter", f"{prefix}{name}_total {getattr(self, name)}"]
        summary = f"{prefix}time_to_first_token_seconds"
        lines += [
            f"# TYPE {summary} summary", f"{summary}_sum {self.first_token_seconds:.6f}",
            f"{summary}_count {self.first_tokens}",
        ]  # fmt: skip
        for name, value in gauges.items():
            lines += [f"# TYPE {prefix}{name} gauge", f"{prefix}{name} {value:g}"]
        return "\n".join(lines) + "\n"


class Service:
    """Connects HTTP with the scheduler. All methods are called in the server's thread.

    Attributes:
        stopping: whether new requests are rejected because the server shuts down; any thread can set it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: ServedModel,
        tokenizer: Tokenizer,
        limits: ServiceLimits,
        api_keys: Sequence[bytes],
    ) -> None:
        """`api_keys`: a request must have one of them; if there are none, no key is required."""
        self.scheduler, self.model, self.tokenizer, self.limits = scheduler, model, tokenizer, limits
        self.metrics = _Metrics()
        self.stopping = False
        self.started = int(time.time())
        self._api_keys = api_keys
        self._outstanding = 0
        # Not in the server's thread, where a long text would delay the streams. One thread only, because tokenizers
        # need not be thread-safe.
        self._parser = ThreadPoolExecutor(1, "parser")

    def is_authorized(self, authorization: bytes) -> bool:
        """Return whether the Authorization header has a valid key."""
        if not self._api_keys:
            return True
        kind, _, key = authorization.partition(b" ")
        # All keys are compared, so that the duration reveals nothing about them.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._api_keys]
        return kind.lower() == b"bearer" and any(matches)

    async def parse(self, parse: Callable[[bytes, ServedModel], ApiRequest], body: bytes) -> ApiRequest:
        """Parse a body in another thread; raises ApiError."""
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse, body, self.model)

    def metrics_text(self) -> str:
        """Return the response of /metrics."""
        return self.metrics.to_text(
            {"running_samples": self.scheduler.running, "waiting_samples": self.scheduler.waiting}
        )

    def acquire(self, samples: int) -> None:
        """Reserve room for samples; raises ApiError if there is none."""
        if self.stopping:
            raise ApiError(503, "the server is shutting down")
        if self._outstanding + samples > self.limits.outstanding:
            raise ApiError(
                429,
                f"{self._outstanding} samples are in progress, and the limit is {self.limits.outstanding}; try again "
                "later",
                code="queue_full",
            )
        self._outstanding += samples

    def release(self, samples: int) -> None:
        """Free the room of samples."""
        self._outstanding -= samples


class ActiveRequest:
    """A request in progress; it must be closed."""

    def __init__(self, service: Service, request: ApiRequest) -> None:
        """Raises ApiError if the server has no room for the samples."""
        service.acquire(len(request.samples))
        self._service = service
        self.choices = [CompletionChoice() for _ in request.samples]
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._begun = time.monotonic()
        self._closed = False
        self._tickets = [Ticket(sample, partial(self._on_event, index)) for index, sample in enumerate(request.samples)]
        service.metrics.prompt_tokens += request.prompt_tokens
        for ticket in self._tickets:
            service.scheduler.submit(ticket)

    async def tokens(self) -> AsyncIterator[list[tuple[int, NewToken]]]:
        """Yield all tokens with the index of their choice, in lists of those that are available together.

        Raises:
            ApiError: the samples were aborted.
        """
        while not all(choice.finished for choice in self.choices):
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            found = []
            for index, event in events:
                if isinstance(event, Aborted):
                    raise ApiError(503, event.reason)
                self.choices[index].tokens.append(event)
                found.append((index, event))
            yield found

    def close(self) -> None:
        """Cancel unfinished samples and free their room; later events are ignored."""
        self._closed = True
        for ticket, choice in zip(self._tickets, self.choices, strict=True):
            if not choice.ended:
                self._service.metrics.cancelled_samples += 1
                self._service.scheduler.cancel(ticket)
                self._service.release(1)

    def _on_event(self, index: int, event: Event) -> None:
        if self._closed:
            return
        metrics, choice = self._service.metrics, self.choices[index]
        if isinstance(event, Aborted):
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
            # Before the response is sent: a client that does not read must not keep others out.
            self._service.release(1)
        self._events.put_nowait((index, event))
