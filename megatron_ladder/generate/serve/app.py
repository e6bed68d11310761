"""The paths of the server, as an ASGI application."""

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

from megatron_ladder.generate.serve.answers import AnswerWriter
from megatron_ladder.generate.serve.metrics import CONTENT_TYPE
from megatron_ladder.generate.serve.questions import ApiError, Question, Rules, read_chat, read_completion
from megatron_ladder.generate.serve.service import Answer, Service

HEALTH = "/health"
"""The one path that needs no key."""


def build_app(service: Service) -> ASGIApp:
    """The application, counted and guarded."""

    def answering(read: Callable[[bytes, Rules], Question]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> "AnswerResponse":
            body = await read_body(request, service)
            return AnswerResponse(service, await service.read(read, body))

        return endpoint

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model_card(service)]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != service.rules.model_name:
            raise ApiError(404, f"this server has the model {service.rules.model_name!r}", "model", "model_not_found")
        return json_response(model_card(service))

    async def health(request: Request) -> Response:
        return json_response({"status": "ending" if service.refusing else "ok"}, 503 if service.refusing else 200)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics.text(service.gauges()), media_type=CONTENT_TYPE)

    routes = [
        Route("/v1/completions", answering(read_completion), methods=["POST"]),
        Route("/v1/chat/completions", answering(read_chat), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route(HEALTH, health),
        Route("/metrics", metrics),
    ]
    app = Starlette(routes=routes, exception_handlers={ApiError: _refuse, HTTPException: _refuse})
    return Gate(app, service, {route.path for route in routes})


class Gate:
    """Lets in who has a key, and counts what everybody is answered."""

    def __init__(self, app: ASGIApp, service: Service, paths: set[str]) -> None:
        """`paths`: that are counted by name; others are counted together."""
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.responses[path, message["status"]] += 1
            await send(message)

        app: ASGIApp = self._app
        if path != HEALTH and not self._service.allows(dict(scope["headers"]).get(b"authorization", b"")):
            error = ApiError(401, "give one of this server's keys as the bearer token", code="invalid_api_key")
            app = json_response(error.to_dict(), 401, {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, counted)


class AnswerResponse:
    """Generates and sends an answer; when the client leaves, the samples end."""

    def __init__(self, service: Service, question: Question) -> None:
        self._service, self._question = service, question
        self._writer = AnswerWriter(question, service.rules.model_name, service.tokenizer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(self._service, self._question)
        try:
            work = asyncio.ensure_future(self._send(answer, scope, receive, send))
            left = asyncio.ensure_future(_until_left(receive))
            try:
                await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                work.cancel()
                left.cancel()
                await asyncio.wait({work, left})
        finally:
            answer.close()

    async def _send(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._question.stream:
            async for _ in answer.tokens():
                pass
            await json_response(self._writer.whole(answer.choices))(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for part in self._events(answer):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, answer: Answer) -> AsyncIterator[bytes]:
        """Server-sent events, as many at once as there are."""
        yield _event(*(self._writer.beginning(index) for index in range(len(answer.choices))))
        try:
            async for tokens in answer.tokens():
                yield _event(*(self._writer.piece(index, token) for index, token in tokens))
        except ApiError as error:
            yield _event(error.to_dict())
            return
        yield _event(self._writer.last_piece(answer.choices)) + b"data: [DONE]\n\n"


async def read_body(request: Request, service: Service) -> bytes:
    """The body of a request; raises ApiError when it is no JSON, too large, or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page that a browser shows can send other types to any server, but not this one.
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind!r}: expected application/json")
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
        raise ApiError(408, f"the body did not come within {service.limits.body_seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the body is not whole") from None
    return bytes(body)


def json_response(values: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON with a status."""
    return Response(msgspec.json.encode(values), status, headers, "application/json")


def model_card(service: Service) -> dict[str, Any]:
    """The one model, as /v1/models lists it."""
    return {
        "id": service.rules.model_name, "object": "model", "created": service.started, "owned_by": "megatron-ladder",
        "max_model_len": service.rules.positions,
    }  # fmt: skip


def _event(*pieces: dict[str, Any] | None) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(piece) + b"\n\n" for piece in pieces if piece is not None)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: Exception) -> Response:
    """ApiErrors, and what the router says of paths and methods, as OpenAI's error objects."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    assert isinstance(error, ApiError)
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    if error.status in (408, 413):
        # What is left of the body would be taken for the next request.
        headers["Connection"] = "close"
    return json_response(error.to_dict(), error.status, headers)
