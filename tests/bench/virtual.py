"""An event loop in virtual time, and scripted OpenAI-compatible servers in it.

Nothing waits: when nobody is ready, the loop's clock jumps to the next timer. Connections are in memory, so client and
server run in one thread with exact times, and no test depends on the machine.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import httptools

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Looks at real files without waiting, and moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits and no timer is set: this would hang for ever"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Servers listen on ports of the loop itself; ``latency`` is the one-way time of the network."""

    def __init__(self, latency: float = 0.0) -> None:
        self._virtual = _Selector()
        self.servers: dict[int, Callable[[], asyncio.Protocol]] = {}
        self.latency = latency
        self.num_connections = 0
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def stall(self, seconds: float) -> None:
        """The thread is busy: time goes by and nobody can run."""
        self._virtual.now += seconds

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(self.latency)
        if port not in self.servers:
            raise ConnectionRefusedError(f"nobody listens on {port}")
        self.num_connections += 1
        ours, theirs = factory(), self.servers[port]()
        near, far = _Pipe(self, ours), _Pipe(self, theirs)
        near.other, far.other = far, near
        theirs.connection_made(far)
        ours.connection_made(near)
        return near, ours


class _Pipe(asyncio.Transport):
    """One end of a connection."""

    other: _Pipe

    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._closed = False
        self._coming: deque[bytes | None] = deque()  # timers of one moment may go off in any order, news may not

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.other.send(bytes(data))

    def close(self) -> None:
        self.send(None)
        self.other.send(None)

    abort = close

    def send(self, news: bytes | None) -> None:
        """On its way to this end: data, or the end of the connection."""
        self._coming.append(news)
        self._loop.call_later(self._loop.latency, self._receive)

    def _receive(self) -> None:
        news = self._coming.popleft()
        if self._closed:
            return
        if news is not None:
            self._protocol.data_received(news)
        else:
            self._closed = True
            self._protocol.connection_lost(None)


class Call:
    """One request at a scripted server: what was asked, when, and how to answer."""

    def __init__(self, transport: asyncio.Transport, path: str, body: bytes) -> None:
        self._transport = transport
        self.path = path
        self.raw = body
        self.arrived = asyncio.get_running_loop().time()
        self._started = False

    @property
    def body(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.raw)
        return value

    def reply(self, status: int, text: str, kind: str = "application/json") -> None:
        data = text.encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
        self._transport.write(head.encode() + data)

    def start(self) -> None:
        self._started = True
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def event(self, value: Any) -> None:
        """One event of a stream."""
        if not self._started:
            self.start()
        data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
        self._transport.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def text(self, text: str, **more: Any) -> None:
        self.event({"choices": [{"text": text, **more}]})

    def end(self, tokens: int | None = None, *, cached: int = 0, reason: str | None = "length") -> None:
        """Finish reason, usage, [DONE], end of the body."""
        if reason:
            self.text("", finish_reason=reason)
        if tokens is not None:
            size = len(self.body.get("prompt") or "x")
            details = {"cached_tokens": cached}
            usage = {"prompt_tokens": size, "completion_tokens": tokens, "prompt_tokens_details": details}
            self.event({"choices": [], "usage": usage})
        self.event(b"[DONE]")
        self.stop()

    def stop(self) -> None:
        """End of the body."""
        self._transport.write(b"0\r\n\r\n")

    def hang_up(self) -> None:
        self._transport.close()


Script = Callable[[Call], Awaitable[None]]


class _Served(asyncio.Protocol):
    def __init__(self, script: Script, calls: list[Call], metrics: Callable[[], str] | None) -> None:
        self._script = script
        self._metrics = metrics
        self._calls = calls
        self._parser = httptools.HttpRequestParser(self)
        self._path = ""
        self._body = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    def on_url(self, url: bytes) -> None:
        self._path += url.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        call = Call(self._transport, self._path, self._body)
        self._path, self._body = "", b""
        if call.path.startswith("/v1/c"):
            self._calls.append(call)
            task = asyncio.ensure_future(self._run(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif call.path == "/v1/models":
            call.reply(200, '{"data": [{"id": "scripted"}]}')
        elif call.path == "/metrics" and self._metrics is not None:
            call.reply(200, self._metrics(), "text/plain")
        else:
            call.reply(404, "{}")

    async def _run(self, call: Call) -> None:
        await self._script(call)


class Server:
    """A scripted server on a port of the virtual loop; ``calls`` are the requests that it got."""

    def __init__(self, script: Script, port: int = 80, metrics: Callable[[], str] | None = None) -> None:
        self.calls: list[Call] = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "scripted servers live in virtual time"
        loop.servers[port] = lambda: _Served(script, self.calls, metrics)
        self.url = f"http://mock:{port}"


def virtual(main: Callable[[], Coroutine[Any, Any, T]], latency: float = 0.0) -> T:
    """Run a coroutine function in virtual time."""
    loop = VirtualLoop(latency)
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def steady(first: float, gap: float, *, per_piece: int = 1) -> Script:
    """Answers every request at once: the first piece after ``first`` seconds, then one every ``gap`` seconds."""

    async def script(call: Call) -> None:
        wanted = call.body["max_tokens"]
        await asyncio.sleep(first)
        sent = 0
        while sent < wanted:
            if sent:
                await asyncio.sleep(gap)
            count = min(per_piece, wanted - sent)
            call.text("x" * count)
            sent += count
        call.end(wanted)

    return script


def slots(count: int, seconds: float) -> Script:
    """``count`` places, first come first served; each request holds one for ``seconds`` and is answered at its end."""
    places = asyncio.Semaphore(count)

    async def script(call: Call) -> None:
        async with places:
            await asyncio.sleep(seconds)
            call.text("x")
            call.end(1)

    return script
