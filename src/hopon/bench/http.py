"""HTTP/1.1 for a load generator: one request per connection at a time, bytes are handed on as they come.

Why not a library: a load generator shares two cores with what it measures, and a stream is thousands of small reads.
Here a read is one call from the event loop into httptools (the parser that uvicorn uses) and on to the answer: no
task, future or queue for each chunk, no limit on connections, and the moment of arrival is the loop's own. All times
and waits are the event loop's, so that tests can run client and server in virtual time.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools


class Reader(Protocol):
    """Who reads an answer."""

    def on_sent(self, now: float) -> None:
        """The request was handed to the network."""

    def on_status(self, status: int, headers: Mapping[str, str]) -> None:
        """The head of the answer is complete; names of headers are in lower case."""

    def on_body(self, data: bytes, now: float) -> None:
        """Some of its body."""


class BrokenError(ConnectionError):
    """The connection ended before the answer did."""


class _Connection(asyncio.Protocol):
    """One connection. ``reader`` is set while a request is open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self._now = 0.0
        self.is_open = False
        self.has_answered = False
        """Bytes have come since the request was sent."""

    async def exchange(self, request: bytes, reader: Reader) -> None:
        """Send a request and hand on its answer until that is complete.

        Raises:
            BrokenError: the server closed the connection too early, or what it sent is not HTTP.
        """
        assert self._transport is not None, "a connection is used when it is made"
        assert self._done is None, "one request at a time"
        self._reader, self._done = reader, self._loop.create_future()
        self._headers = {}
        self.has_answered = False
        self._transport.write(request)
        reader.on_sent(self._loop.time())
        try:
            await self._done
        finally:
            self._reader = self._done = None

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ---- what asyncio calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._now = self._loop.time()
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(BrokenError(f"not HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol. A body without a length ends with its connection."""
        self.is_open = False
        has_length = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self._headers and not has_length:
            self._end(None)
        else:
            self._end(BrokenError(str(error) if error else "the connection was closed before the answer was complete"))

    # ---- what the parser calls ----

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self._reader is not None:
            self._reader.on_status(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        """See httptools."""
        if self._reader is not None:
            self._reader.on_body(data, self._now)

    def on_message_complete(self) -> None:
        """See httptools."""
        if not self._parser.should_keep_alive():
            self.close()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class Connections:
    """All connections to one server: idle ones are used again, and there are as many as there are open requests.

    Args:
        url: scheme, host and perhaps port and path.

    Raises:
        ValueError: not an http or https address.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a server's address looks like http://HOST:PORT, got {url!r}")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._authority = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/")
        self._idle: list[_Connection] = []

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
        """A request's bytes."""
        lines = [f"{method} {self._path}{path} HTTP/1.1", f"host: {self._authority}", "accept: */*"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    async def exchange(self, request: bytes, reader: Reader) -> None:
        """Send a request over an idle or a new connection and read its answer.

        A kept connection that the server has just closed is replaced once, as every HTTP client does.

        Raises:
            OSError: no connection, or it broke.
        """
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                return await self._use(connection, request, reader)
            except BrokenError:
                if connection.has_answered:
                    raise
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(loop), self._host, self._port, ssl=self._tls)
        await self._use(connection, request, reader)

    async def _use(self, connection: _Connection, request: bytes, reader: Reader) -> None:
        try:
            await connection.exchange(request, reader)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)

    def close(self) -> None:
        """Hang up everywhere."""
        while self._idle:
            self._idle.pop().close()


class Whole:
    """Reads an answer as a whole."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_sent(self, now: float) -> None:
        """Nothing to note."""

    def on_status(self, status: int, headers: Mapping[str, str]) -> None:
        """Note it."""
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        """Collect it."""
        self.body += data


async def get(connections: Connections, path: str, headers: Mapping[str, str], timeout: float = 5.0) -> bytes | None:
    """The body of a page; None when it does not answer with 200 in time."""
    answer = Whole()
    try:
        async with asyncio.timeout(timeout):
            await connections.exchange(connections.request("GET", path, headers), answer)
    except OSError:  # a timeout is one, too
        return None
    return answer.body if answer.status == 200 else None
