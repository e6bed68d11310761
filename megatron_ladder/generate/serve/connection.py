"""One client's connection: as uvicorn speaks HTTP on it, and ended where the client keeps the server waiting.

    no whole header                        HEAD_SECONDS from the connection, or from the first byte of a further request
    bytes that the client does not read    UNREAD_SECONDS in which it takes none

The limit of a body is the application's own, which can still answer; and after an answer uvicorn waits only so long.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0
"""Until a request's header must be there."""
UNREAD_SECONDS = 30.0
"""In which a client must take something of what waits for it."""


class LimitedConnection(H11Protocol):
    """uvicorn's protocol with the limits of time that it lacks."""

    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first header."""
        super().connection_made(transport)
        # Then writing is paused exactly as long as the system does not take all.
        transport.set_write_buffer_limits(high=0)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Bytes of a header, or of a body."""
        super().data_received(data)
        self._watch_head()

    def pause_writing(self) -> None:
        """The client does not read as fast as is written."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """It has everything."""
        super().resume_writing()
        self._stop_unread_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more to wait for."""
        super().connection_lost(exc)
        self._stop_head_timer()
        self._stop_unread_timer()

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_unread(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._end_unless_read, unread)

    def _end_unless_read(self, before: int) -> None:
        # Closing would wait for the client to take the rest.
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_unread()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
