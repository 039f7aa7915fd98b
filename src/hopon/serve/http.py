"""The HTTP protocol of a connection, with limits that keep clients from holding it open half-said, and a short way out.

Clients that send their headers slowly, or without end, are cut off; bodies are the business of
:mod:`hopon.serve.door`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 1 << 16
"""Of one request, the request line included. What arrives in one read with the end of the headers is let pass."""


class Writer:
    """Writes parts of a chunked body without waiting: no task, no message through every layer of the application.

    That is for bodies whose headers have been sent, while the client keeps up. Else the application has to send, which
    waits until the connection takes more.

    Args:
        cycle: uvicorn's record of one request and its answer.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._flow = cycle.flow

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`write` may be called just now."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding  # known once the headers have been sent
            and not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write(self, body: bytes) -> None:
        """One more part, which must not be empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which waits for the end of the headers for ever and keeps any amount of them."""

    header_timeout = 30.0
    """Seconds from the first byte of a request, or from the connection, to the end of its headers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._num_header_bytes = 0
        self._in_headers = True
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._in_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(431, "Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and cycle.scope is self.scope:  # else there will be no answer
            self.scope["hopon.writer"] = Writer(cycle)  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        """See httptools."""
        super().on_message_complete()
        self._in_headers = True
        self._num_header_bytes = 0

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._is_answering():
            self._start_timer()  # the next request on this connection is late, but the one before is not done
        elif not self.transport.is_closing():
            self._refuse(408, "Request Timeout")

    def _refuse(self, status: int, reason: str) -> None:
        """There is no request yet that a route could answer."""
        if not self._is_answering():
            head = f"HTTP/1.1 {status} {reason}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete
