"""The HTTP side of the server: requests in progress and the ASGI application."""

import asyncio
import contextlib
import hmac
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_ladder.generate.options import ServeOptions
from megatron_ladder.generate.requests import NewToken
from megatron_ladder.generate.serve.connection import BODY_SECONDS
from megatron_ladder.generate.serve.prompt_process import PromptError, PromptProcess, PromptSetup
from megatron_ladder.generate.serve.protocol import (
    ApiError,
    ApiRequest,
    ParsedRequest,
    ServedModel,
    parse_chat,
    parse_completion,
)
from megatron_ladder.generate.serve.responses import ResponseWriter
from megatron_ladder.generate.serve.scheduler import Aborted, Event, Scheduler, Ticket

_AMBIGUOUS = "ambiguous_length"
_HEALTH = "/health"
"""The only path that requires no key."""
_SMALL_BODY = 1 << 16
"""Bytes of a body that do not count as a large one."""
_LARGE_BODIES = 16
"""Number of largest bodies whose bytes the server holds at the same time while they arrive."""


@dataclass(frozen=True)
class ServerSetup:
    """Everything that the server needs in addition to the engine."""

    options: ServeOptions
    model: ServedModel
    prompts: PromptSetup
    api_keys: tuple[bytes, ...]
    """A request must have one of them; if there are none, no key is required."""
    listener: socket.socket | None


@dataclass
class _Metrics:
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By path and status."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cancelled_samples: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    """Sum over all samples of the time to their first token."""


_Parse = Callable[[bytes, ServedModel], ParsedRequest]


class Service:
    """Connects HTTP with the scheduler. All methods are called in the server's thread."""

    def __init__(self, scheduler: Scheduler, setup: ServerSetup) -> None:
        self.scheduler, self.setup, self.model = scheduler, setup, setup.model
        self.metrics = _Metrics()
        # Whether new requests are rejected because the server shuts down; any thread can set it.
        self.stopping = False
        local = setup.listener is not None and ipaddress.ip_address(setup.listener.getsockname()[0]).is_loopback
        self.only_local_hosts = local and not setup.api_keys
        self._outstanding = 0
        self._arriving_bytes = 0
        # Not in the server's thread, where a long body would delay the streams.
        self._parser = ThreadPoolExecutor(1, "parser")
        self._schema_compiler = ThreadPoolExecutor(1, "schemas")
        self.prompts = PromptProcess(setup.prompts)

    def is_authorized(self, authorization: bytes) -> bool:
        """Return whether the Authorization header has a valid key."""
        if not self.setup.api_keys:
            return True
        kind, _, key = authorization.partition(b" ")
        # All keys are compared, so that the duration reveals nothing about them.
        matches = [hmac.compare_digest(key.strip(), known) for known in self.setup.api_keys]
        return kind.lower() == b"bearer" and any(matches)

    def refusal(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Return the error of a request whose body is not needed to reject it."""
        if {b"content-length", b"transfer-encoding"} <= headers.keys():
            # A proxy may find another end of the body than this server.
            message = "the request has both Content-Length and Transfer-Encoding; send one of them"
            return ApiError(400, message, code=_AMBIGUOUS)
        if path != _HEALTH and not self.is_authorized(headers.get(b"authorization", b"")):
            return ApiError(401, "send one of this server's keys as the bearer token", code="invalid_api_key")
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if self.only_local_hosts and not _is_local(host, self.setup.options.host):
            # A web page whose name resolves to this machine could use the server through its visitors' browsers.
            message = f"the Host header is {host!r}; without --api-key-file only this machine's own names are allowed"
            return ApiError(403, message, code="invalid_host")
        return None

    async def parse(self, parse: _Parse, body: bytes) -> ParsedRequest:
        """Parse a body in another thread; raises ApiError."""
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse, body, self.model)

    async def complete(self, parsed: ParsedRequest) -> ApiRequest:
        """Encode the prompts; reserve room for the samples before. Raises ApiError if there is none."""
        self.acquire(parsed.count)
        try:
            prompts: Sequence[Sequence[int]] = parsed.prompts
            if not isinstance(prompts[0], list):
                encoded = await asyncio.wrap_future(self.prompts.encode(prompts))
                prompts = encoded
            executor = self._schema_compiler if parsed.has_schema else self._parser
            return await asyncio.get_running_loop().run_in_executor(executor, parsed.complete, prompts)
        except BaseException as error:
            for _ in range(parsed.count):
                self.release()
            if isinstance(error, PromptError):
                raise ApiError(500 if error.is_fault else 400, error.message, parsed.param, error.code) from None
            raise

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
            lines.append(f"# TYPE megatron_ladder_{name} {kind}")
            lines += [f"megatron_ladder_{name}{suffix} {value}" for suffix, value in values.items()]
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

    @contextlib.contextmanager
    def arriving_body(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes the size of a body so far; it raises ApiError if there is no room for it."""
        limit = _LARGE_BODIES * self.setup.options.max_body_bytes
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            added = max(0, size - _SMALL_BODY) - counted
            if self._arriving_bytes + added > limit:
                raise ApiError(429, "too many large bodies are arriving; try again later", code="queue_full")
            counted += added
            self._arriving_bytes += added

        try:
            yield count
        finally:
            self._arriving_bytes -= counted

    def release(self) -> None:
        """Free the room of one sample."""
        self._outstanding -= 1


class _ActiveRequest:
    """A request in progress, with the tokens of each choice so far; it must be closed, which frees its room."""

    def __init__(self, service: Service, request: ApiRequest) -> None:
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
        """Yield lists of available tokens with their choices' indices; raises ApiError if the samples are aborted."""
        unfinished = len(self.choices)
        while unfinished:
            found: list[tuple[int, NewToken]] = []
            while not found or not self._events.empty():
                index, event = await self._events.get()
                if isinstance(event, Aborted):
                    raise ApiError(event.status, event.reason, event.param)
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


def build_app(service: Service) -> ASGIApp:
    """Return the application, which checks the key of each request and counts the responses by path and status."""
    name = service.model.name
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "megatron-ladder",
        "max_model_len": service.model.positions,
    }

    def generating(parse: _Parse) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> "_GeneratedResponse":
            with service.arriving_body() as count:
                body = await _read_body(request, service.setup.options.max_body_bytes, count)
                return _GeneratedResponse(service, await service.parse(parse, body))

        return endpoint

    async def models(request: Request) -> Response:
        return _json_response({"object": "list", "data": [card]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != name:
            raise ApiError(404, f"this server has the model {name!r}", "model", "model_not_found")
        return _json_response(card)

    async def health(request: Request) -> Response:
        return _json_response({"status": "ending"}, 503) if service.stopping else _json_response({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = [
        Route("/v1/completions", generating(parse_completion), methods=["POST"]),
        Route("/v1/chat/completions", generating(parse_chat), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route(_HEALTH, health),
        Route("/metrics", metrics),
    ]
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _on_error))
    paths = {route.path for route in routes}

    async def checked_and_counted(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in paths else "other"

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                service.metrics.responses[path, message["status"]] += 1
            await send(message)

        error = service.refusal(path, dict(scope["headers"]))
        await (app if error is None else await _on_error(None, error))(scope, receive, counted_send)

    return checked_and_counted


class _GeneratedResponse:
    """Generates and sends a response; prompts and samples are cancelled if the client disconnects."""

    def __init__(self, service: Service, parsed: ParsedRequest) -> None:
        self._service, self._parsed = service, parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def until_disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work = asyncio.ensure_future(self._respond(scope, receive, send))
        disconnected = asyncio.ensure_future(until_disconnected())
        try:
            await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            disconnected.cancel()
            await asyncio.wait({work, disconnected})

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self._service.complete(self._parsed)
        with contextlib.closing(_ActiveRequest(self._service, request)) as active:
            writer = ResponseWriter(request, self._service.model.name, self._service.model.tokenizer)
            if request.stream:
                await self._stream(active, writer, send)
                return
            async for _ in active.tokens():
                pass
            # Not in the server's thread, because a long prompt can have thousands of scores.
            response = await asyncio.to_thread(lambda: _json_response(writer.complete(active.choices)))
            await response(scope, receive, send)

    async def _stream(self, active: _ActiveRequest, writer: ResponseWriter, send: Send) -> None:
        async def send_events(chunks: Iterable[dict[str, Any] | None]) -> None:
            events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks if chunk is not None]
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})

        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_events(writer.first_chunk(index) for index in range(len(active.choices)))
        end = b""
        try:
            async for tokens in active.tokens():
                await send_events(writer.chunk(index, token) for index, token in tokens)
            await send_events([writer.last_chunk(active.choices)])
            end = b"data: [DONE]\n\n"
        except ApiError as error:
            await send_events([error.to_dict()])
        await send({"type": "http.response.body", "body": end, "more_body": False})


async def _read_body(request: Request, limit: int, count: Callable[[int], None]) -> bytes:
    """Return the body; raises ApiError if it is not JSON, too large, too slow, or incomplete.

    `count` is called with the number of bytes so far, and may raise ApiError as well.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A web page can send other content types to any server without the server's consent.
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind!r}; expected application/json")
    too_large = ApiError(413, f"the body is larger than {limit} bytes")
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
                count(len(body))
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the body is incomplete") from None
    return bytes(body)


def _json_response(values: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(values), status, headers, "application/json")


def _is_local(host: str, own: str) -> bool:
    """Return whether a Host header names this machine: localhost, a loopback address, or --host (`own`)."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", own) or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _on_error(request: Request | None, error: Exception) -> Response:
    """Return OpenAI's error object for an ApiError, for the router's error about a path or method, or for a bug."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        assert request is not None
        headers = dict(error.headers or {})
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    if not isinstance(error, ApiError):
        # uvicorn prints the traceback.
        error = ApiError(500, f"internal error: {type(error).__name__}")
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    if error.status in (408, 413) or error.code == _AMBIGUOUS:
        # The rest of the body would be parsed as the next request.
        headers["Connection"] = "close"
    return _json_response(error.to_dict(), error.status, headers)
