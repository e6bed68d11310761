"""Timeouts of slow clients, over real sockets."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from megatron_ladder.generate.serve import connection as connection_module
from megatron_ladder.generate.serve.connection import LimitedConnection

HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"
BUFFER_BYTES = 16384
App = Callable[[Any, Any, Any], Awaitable[None]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def set_timeouts(monkeypatch: pytest.MonkeyPatch, header: float = 1000.0, unread: float = 1000.0) -> None:
    monkeypatch.setattr(connection_module, "HEADER_SECONDS", header)
    monkeypatch.setattr(connection_module, "UNREAD_SECONDS", unread)


def responding(body: bytes, seconds: float = 0.0) -> App:
    """Return an application that responds with a body after some time."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(seconds)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


@contextlib.asynccontextmanager
async def connected(app: App) -> AsyncIterator[Streams]:
    """Connect a client through small socket buffers; yield its streams."""
    config = uvicorn.Config(app, http=LimitedConnection, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        server = await asyncio.get_running_loop().create_server(
            lambda: LimitedConnection(config=config, server_state=state, app_state={}), sock=listener
        )
        client.connect(listener.getsockname())
        reader, writer = await asyncio.open_connection(sock=client, limit=BUFFER_BYTES)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
            server.close()


@pytest.mark.parametrize("beginning", [b"", HEAD, HEAD + b"\r\n" + HEAD], ids=["nothing", "half", "half of a second"])
def test_connection_without_a_complete_header_is_closed(beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, header=0.2)

    async def trickle(writer: asyncio.StreamWriter) -> None:
        writer.write(beginning)
        while beginning:
            await asyncio.sleep(0.02)
            writer.write(b"A: b\r\n")

    async def talk() -> bytes:
        async with connected(responding(b"x")) as (reader, writer):
            trickling = asyncio.ensure_future(trickle(writer))
            found = b""
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(10):
                    while part := await reader.read(1000):
                        found += part
            trickling.cancel()
            return found

    assert asyncio.run(talk()).count(b" 200 ") == beginning.count(b"\r\n\r\n")


def test_response_may_take_longer_than_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, header=0.2)

    async def talk() -> list[bytes]:
        async with connected(responding(b"xyz", seconds=0.5)) as (reader, writer):
            found = []
            for _ in range(2):
                writer.write(HEAD + b"\r\n")
                found.append(await asyncio.wait_for(reader.readuntil(b"xyz"), 10))
            return found

    assert len(asyncio.run(talk())) == 2


def test_client_that_reads_nothing_counts_as_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, unread=0.2)
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not events:
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            with contextlib.suppress(TimeoutError):
                message = await asyncio.wait_for(receive(), 0.001)
                events.extend(["disconnected"] if message["type"] == "http.disconnect" else [])

    async def talk() -> None:
        async with connected(app) as (reader, writer):
            # The client stops reading.
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(HEAD + b"\r\n")
            async with asyncio.timeout(20):
                while not events:
                    await asyncio.sleep(0.02)

    asyncio.run(talk())
    assert events == ["disconnected"]


def test_client_that_reads_slowly_receives_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, unread=0.3)
    body = bytes(range(256)) * 2000

    async def talk() -> bytes:
        async with connected(responding(body)) as (reader, writer):
            writer.write(HEAD + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
            found = b""
            while len(found) < len(body):
                part = await asyncio.wait_for(reader.read(BUFFER_BYTES), 10)
                assert part, "the connection was closed too early"
                found += part
                await asyncio.sleep(0.03)
            return found

    begun = time.monotonic()
    assert asyncio.run(talk()) == body
    assert time.monotonic() - begun > 0.6
