"""State of the server's thread: keys, limits, metrics, and the requests that are in progress."""

import asyncio
import hmac
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from megatron_ladder.data.tokenizers import Tokenizer
from megatron_ladder.generate.options import ServeOptions
from megatron_ladder.generate.requests import NewToken
from megatron_ladder.generate.serve.protocol import ApiError, ApiRequest, ServedModel
from megatron_ladder.generate.serve.scheduler import Aborted, Event, Scheduler, Ticket

_METRICS_PREFIX = "megatron_ladder_"


@dataclass(frozen=True)
class ServerSetup:
    """Everything that the server needs in addition to the engine."""

    options: ServeOptions
    model: ServedModel
    tokenizer: Tokenizer
    api_keys: tuple[bytes, ...]
    """A request must have one of them; if there are none, no key is required."""
    listener: socket.socket | None
    """The listening socket, on rank 0."""


@dataclass
class _Metrics:
    """Counters of the server; only its thread uses them."""

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By path and status."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cancelled_samples: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    """Sum over all samples of the time to their first token."""


class Service:
    """Connects HTTP with the scheduler. All methods are called in the server's thread.

    Attributes:
        stopping: whether new requests are rejected because the server shuts down; any thread can set it.
    """

    def __init__(self, scheduler: Scheduler, setup: ServerSetup) -> None:
        self.scheduler, self.setup, self.model = scheduler, setup, setup.model
        self.metrics = _Metrics()
        self.stopping = False
        self._outstanding = 0
        # Not in the server's thread, where a long text would delay the streams. One thread only, because tokenizers
        # need not be thread-safe.
        self._parser = ThreadPoolExecutor(1, "parser")

    def is_authorized(self, authorization: bytes) -> bool:
        """Return whether the Authorization header has a valid key."""
        if not self.setup.api_keys:
            return True
        kind, _, key = authorization.partition(b" ")
        # All keys are compared, so that the duration reveals nothing about them.
        matches = [hmac.compare_digest(key.strip(), known) for known in self.setup.api_keys]
        return kind.lower() == b"bearer" and any(matches)

    async def parse(self, parse: Callable[[bytes, ServedModel], ApiRequest], body: bytes) -> ApiRequest:
        """Parse a body in another thread; raises ApiError."""
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse, body, self.model)

    def metrics_text(self) -> str:
        """Return the response of /metrics, in Prometheus's text format."""
        metrics = self.metrics
        responses = {
            f'{{path="{path}",status="{status}"}}': count for (path, status), count in sorted(metrics.responses.items())
        }
        waits = {"_sum": f"{metrics.first_token_seconds:.6f}", "_count": metrics.first_tokens}
        families: list[tuple[str, str, Mapping[str, object]]] = [
            ("responses_total", "counter", responses),
            ("prompt_tokens_total", "counter", {"": metrics.prompt_tokens}),
            ("generated_tokens_total", "counter", {"": metrics.generated_tokens}),
            ("cancelled_samples_total", "counter", {"": metrics.cancelled_samples}),
            ("time_to_first_token_seconds", "summary", waits),
            ("running_samples", "gauge", {"": self.scheduler.running}),
            ("waiting_samples", "gauge", {"": self.scheduler.waiting}),
        ]
        lines = []
        for name, kind, values in families:
            lines.append(f"# TYPE {_METRICS_PREFIX}{name} {kind}")
            lines += [f"{_METRICS_PREFIX}{name}{suffix} {value}" for suffix, value in values.items()]
        return "\n".join(lines) + "\n"

    def acquire(self, samples: int) -> None:
        """Reserve room for samples; raises ApiError if there is none."""
        if self.stopping:
            raise ApiError(503, "the server is shutting down")
        limit = self.setup.options.max_concurrent + self.setup.options.max_queue
        if self._outstanding + samples > limit:
            message = f"{self._outstanding} samples are in progress, and the limit is {limit}; try again later"
            raise ApiError(429, message, code="queue_full")
        self._outstanding += samples

    def release(self) -> None:
        """Free the room of one sample."""
        self._outstanding -= 1


class ActiveRequest:
    """A request in progress; it must be closed.

    Attributes:
        choices: the tokens of each choice so far.
    """

    def __init__(self, service: Service, request: ApiRequest) -> None:
        """Raises ApiError if the server has no room for the samples."""
        service.acquire(len(request.samples))
        self._service = service
        self.choices: list[list[NewToken]] = [[] for _ in request.samples]
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._begun = time.monotonic()
        self._unfinished = {
            index: Ticket(sample, partial(self._on_event, index)) for index, sample in enumerate(request.samples)
        }
        service.metrics.prompt_tokens += request.prompt_tokens
        for ticket in self._unfinished.values():
            service.scheduler.submit(ticket)

    async def tokens(self) -> AsyncIterator[list[tuple[int, NewToken]]]:
        """Yield all tokens with the index of their choice, in lists of those that are available together.

        Raises:
            ApiError: the samples were aborted.
        """
        unfinished = len(self.choices)
        while unfinished:
            found: list[tuple[int, NewToken]] = []
            while not found or not self._events.empty():
                index, event = await self._events.get()
                if isinstance(event, Aborted):
                    raise ApiError(503, event.reason)
                found.append((index, event))
                unfinished -= event.finish_reason is not None
            yield found

    def close(self) -> None:
        """Cancel unfinished samples and free their room; later events are ignored."""
        for ticket in self._unfinished.values():
            self._service.metrics.cancelled_samples += 1
            self._service.scheduler.cancel(ticket)
            self._service.release()
        self._unfinished.clear()

    def _on_event(self, index: int, event: Event) -> None:
        if index not in self._unfinished:
            return
        metrics = self._service.metrics
        if isinstance(event, Aborted):
            metrics.cancelled_samples += 1
        else:
            metrics.generated_tokens += 1
            if not self.choices[index]:
                metrics.first_tokens += 1
                metrics.first_token_seconds += time.monotonic() - self._begun
            self.choices[index].append(event)
        if isinstance(event, Aborted) or event.finish_reason is not None:
            # Before the response is sent: a client that does not read must not keep others out.
            del self._unfinished[index]
            self._service.release()
        self._events.put_nowait((index, event))
