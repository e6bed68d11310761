"""The HTTP side of the server: an ASGI application, and uvicorn's protocol with the timeouts that it lacks.

Timeouts of a connection:

    header                              HEADER_SECONDS from the connection, or from the first byte of a further request
    body                                ServiceLimits.body_seconds; the client gets an error response
    response that the client does not read    UNREAD_SECONDS without any progress
    next request                        uvicorn's keep-alive timeout
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_ladder.generate.serve.protocol import (
    ApiError,
    ApiRequest,
    ServedModel,
    parse_chat,
    parse_completion,
)
from megatron_ladder.generate.serve.responses import ResponseWriter
from megatron_ladder.generate.serve.service import METRICS_CONTENT_TYPE, ActiveRequest, Service

_HEALTH = "/health"
"""The only path that requires no key."""
HEADER_SECONDS = 30.0
UNREAD_SECONDS = 30.0


def build_app(service: Service) -> ASGIApp:
    """Return the application, with authorization and response counts."""

    def generating(parse: Callable[[bytes, ServedModel], ApiRequest]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> "_GeneratedResponse":
            body = await _read_body(request, service)
            return _GeneratedResponse(service, await service.parse(parse, body))

        return endpoint

    async def models(request: Request) -> Response:
        return _json_response({"object": "list", "data": [_model_card(service)]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != service.model.name:
            raise ApiError(404, f"this server has the model {service.model.name!r}", "model", "model_not_found")
        return _json_response(_model_card(service))

    async def health(request: Request) -> Response:
        if service.stopping:
            return _json_response({"status": "ending"}, 503)
        return _json_response({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics_text(), media_type=METRICS_CONTENT_TYPE)

    routes = [
        Route("/v1/completions", generating(parse_completion), methods=["POST"]),
        Route("/v1/chat/completions", generating(parse_chat), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route(_HEALTH, health),
        Route("/metrics", metrics),
    ]
    app = Starlette(routes=routes, exception_handlers={ApiError: _on_error, HTTPException: _on_error})
    return _Gate(app, service, {route.path for route in routes})


class _Gate:
    """Checks the key of each request, and counts the responses by path and status."""

    def __init__(self, app: ASGIApp, service: Service, paths: set[str]) -> None:
        """`paths`: those to count by name; all others are counted as "other"."""
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.responses[path, message["status"]] += 1
            await send(message)

        app: ASGIApp = self._app
        if path != _HEALTH and not self._service.is_authorized(dict(scope["headers"]).get(b"authorization", b"")):
            error = ApiError(401, "send one of this server's keys as the bearer token", code="invalid_api_key")
            app = _json_response(error.to_dict(), 401, {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, counted_send)


class _GeneratedResponse:
    """Generates and sends a response; the samples are cancelled if the client disconnects."""

    def __init__(self, service: Service, request: ApiRequest) -> None:
        self._service, self._request = service, request
        self._writer = ResponseWriter(request, service.model.name, service.tokenizer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        active = ActiveRequest(self._service, self._request)
        try:
            work = asyncio.ensure_future(self._send(active, scope, receive, send))
            disconnected = asyncio.ensure_future(_until_disconnected(receive))
            try:
                await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                work.cancel()
                disconnected.cancel()
                await asyncio.wait({work, disconnected})
        finally:
            active.close()

    async def _send(self, active: ActiveRequest, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._request.stream:
            async for _ in active.tokens():
                pass
            await _json_response(self._writer.complete(active.choices))(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for part in self._events(active):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, active: ActiveRequest) -> AsyncIterator[bytes]:
        """Yield server-sent events, all available ones together."""
        yield _event(*(self._writer.first_chunk(index) for index in range(len(active.choices))))
        try:
            async for tokens in active.tokens():
                yield _event(*(self._writer.chunk(index, token) for index, token in tokens))
        except ApiError as error:
            yield _event(error.to_dict())
            return
        yield _event(self._writer.last_chunk(active.choices)) + b"data: [DONE]\n\n"


async def _read_body(request: Request, service: Service) -> bytes:
    """Return the body; raises ApiError if it is not JSON, too large, too slow, or incomplete."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A web page can send other content types to any server without the server's consent.
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind!r}; expected application/json")
    limit = service.limits.body_bytes
    too_large = ApiError(413, f"the body is larger than {limit} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(service.limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {service.limits.body_seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the body is incomplete") from None
    return bytes(body)


def _json_response(values: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(values), status, headers, "application/json")


def _model_card(service: Service) -> dict[str, Any]:
    """Return the model as /v1/models lists it."""
    return {
        "id": service.model.name, "object": "model", "created": service.started, "owned_by": "megatron-ladder",
        "max_model_len": service.model.positions,
    }  # fmt: skip


def _event(*chunks: dict[str, Any] | None) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks if chunk is not None)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _on_error(request: Request, error: Exception) -> Response:
    """Return OpenAI's error object for an ApiError, or for the router's error about a path or method."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    assert isinstance(error, ApiError)
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    if error.status in (408, 413):
        # The rest of the body would be parsed as the next request.
        headers["Connection"] = "close"
    return _json_response(error.to_dict(), error.status, headers)


class LimitedConnection(H11Protocol):
    """uvicorn's connection to a client, with timeouts for headers and for responses that the client does not read."""

    _header_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first header."""
        super().connection_made(transport)
        # With this limit, writing is paused exactly while the operating system does not accept all bytes.
        transport.set_write_buffer_limits(high=0)
        self._watch_header()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a header or body."""
        super().data_received(data)
        self._watch_header()

    def pause_writing(self) -> None:
        """Start the timer: the client reads more slowly than the server writes."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """Stop the timer: all bytes were accepted."""
        super().resume_writing()
        self._stop_unread_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        super().connection_lost(exc)
        self._stop_header_timer()
        self._stop_unread_timer()

    def _watch_header(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _watch_unread(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._abort_unless_read, unread)

    def _abort_unless_read(self, before: int) -> None:
        # Closing instead of aborting would wait for the client to read the rest.
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_unread()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
