"""Connections: uvicorn's protocol with timeouts and a limit on the number of clients.

Timeouts of a connection:

    header                                    HEADER_SECONDS from the connection or from the next request's first byte
    body                                      BODY_SECONDS; the client gets an error response
    response that the client does not read    UNREAD_SECONDS without any progress
    next request                              uvicorn's keep-alive timeout
"""

import asyncio

import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_ladder.generate.serve.protocol import ApiError

HEADER_SECONDS = BODY_SECONDS = UNREAD_SECONDS = 30.0
_BODY = msgspec.json.encode(ApiError(503, "the server has too many connections; try again later").to_dict())
_TOO_MANY = b"""HTTP/1.1 503 Service Unavailable\r
Content-Type: application/json\r
Retry-After: 1\r
Connection: close\r
Content-Length: %d\r
\r
%s""" % (len(_BODY), _BODY)


class LimitedConnection(H11Protocol):
    """uvicorn's connection to a client, with limits."""

    most_connections = 512
    _header_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first header, or reject the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            transport.write(_TOO_MANY)
            transport.close()
            return
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
        if self._unread_timer is not None:
            self._unread_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        super().connection_lost(exc)
        for timer in (self._header_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()

    def _watch_header(self) -> None:
        responding = self.cycle is not None and not self.cycle.response_complete
        if self._header_timer is None and not responding:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
        elif self._header_timer is not None and responding:
            self._header_timer.cancel()
            self._header_timer = None

    def _watch_unread(self) -> None:
        unread = self.transport.get_write_buffer_size()

        def check() -> None:
            # Closing instead of aborting would wait for the client to read the rest.
            if self.transport.get_write_buffer_size() >= unread:
                self.transport.abort()
            else:
                self._watch_unread()

        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, check)
