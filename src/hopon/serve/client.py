"""The API process's side of the engine process: start it, submit and abort requests, hand out news, notice its death.

It knows tokens and processes; texts and HTTP are elsewhere. One asyncio loop owns a client; nothing here is for several
threads.

Every open request keeps what was delivered of it, and every message carries the engine's incarnation: that is what a
restarted engine needs to go on where its predecessor died.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.engine import EngineStats
from hopon.core.types import Delta, FinishReason, Request
from hopon.serve import wire

Progress = Callable[[str, float], None]
"""Called while the engine loads: (what is being done, share done in [0, 1])."""


class EngineError(Exception):
    """The engine cannot be started, or has died. The message is for the user."""


class ConsumerGoneError(Exception):
    """Whoever waited for the news has left."""


class Mailbox:
    """News of the requests of one consumer, in order of arrival. News that piles up is handed out together."""

    def __init__(self) -> None:
        self._news: list[tuple[int, Delta]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._end: Exception | None = None

    def put(self, slot: int, delta: Delta) -> None:
        """Add news of the consumer's request number ``slot``."""
        self._news.append((slot, delta))
        self._wake()

    def leave(self) -> None:
        """The consumer is gone: :meth:`get` raises from now on."""
        self.fail(ConsumerGoneError())

    def fail(self, error: Exception) -> None:
        """Nothing more shall be handed out: :meth:`get` raises this from now on."""
        if self._end is None:
            self._end = error
        self._wake()

    async def get(self) -> list[tuple[int, Delta]]:
        """Everything that has arrived; waits for something.

        Raises:
            ConsumerGoneError: after :meth:`leave`.
            Exception: what :meth:`fail` was given.
        """
        if not self._news and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._end is not None:
            raise self._end
        news, self._news = self._news, []
        return news

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(eq=False, slots=True)
class Ticket:
    """An open request: where its news goes, and the tokens that have been handed out."""

    request: Request
    mailbox: Mailbox
    slot: int
    delivered: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineHandle:
    """A started engine process and our end of the socket to it."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    incarnation: int


def launch(factory: str, options: EngineOptions, *, incarnation: int = 1, traces: bool = False) -> EngineHandle:
    """Start an engine process that loads ``factory`` ("package.module:function") with ``options``.

    Returns at once; the engine loads meanwhile. It gets a process group of its own, so that Ctrl-C reaches the API
    process alone, which then ends both in order.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "hopon.serve.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    ours.sendall(wire.frame(wire.Start(factory, options, incarnation, traces)))
    return EngineHandle(process=process, sock=ours, incarnation=incarnation)


class EngineClient(asyncio.Protocol):
    """Talks to one engine process. Made by :meth:`attach`.

    Args:
        handle: a launched process.
        on_progress: told what the engine is doing while it loads.
    """

    def __init__(self, handle: EngineHandle, on_progress: Progress | None = None) -> None:
        self._handle = handle
        self._on_progress = on_progress or (lambda what, share: None)
        self._frames = wire.Frames()
        self._transport: asyncio.Transport | None = None
        self._tickets: dict[str, Ticket] = {}
        self._ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self._last_heard = time.monotonic()
        self._last_words = ""
        self._closing = False
        self.dead = asyncio.Event()
        """Set when the engine has gone without being asked to."""
        self.problem = ""
        """Why it is dead."""
        self.stats: EngineStats | None = None
        """The newest gauges and counters; None before the first step."""
        self.on_news: Callable[[wire.News], None] = lambda news: None
        """Called with every message of news before its deltas are handed out."""

    @classmethod
    async def attach(cls, handle: EngineHandle, on_progress: Progress | None = None) -> EngineClient:
        """Connect to a launched engine and wait until it is ready.

        Raises:
            EngineError: it could not load; the message says why.
        """
        handle.sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(handle, on_progress), sock=handle.sock)
        try:
            await client._ready
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def config(self) -> SchedulerConfig:
        """Limits of the engine."""
        return self._ready.result().config

    @property
    def summary(self) -> dict[str, str | int | float]:
        """What the engine says of itself."""
        return self._ready.result().summary

    @property
    def num_open(self) -> int:
        """Unfinished requests."""
        return len(self._tickets)

    @property
    def oldest_unanswered(self) -> float | None:
        """Arrival of the oldest request that has not had a token yet, on the monotonic clock; None if there is none."""
        return min((t.request.arrival for t in self._tickets.values() if not t.delivered), default=None)

    def silent_for(self) -> float:
        """Seconds without any news although requests are open. An engine at work reports after every step."""
        return time.monotonic() - self._last_heard if self._tickets else 0.0

    def submit(self, request: Request, mailbox: Mailbox, slot: int = 0) -> Ticket:
        """Send a request to the engine; its news goes to the mailbox. Ends exactly once unless it is aborted.

        Raises:
            EngineError: the engine is dead or leaving.
        """
        if self.dead.is_set() or self._closing or self._transport is None:
            raise EngineError(self.problem or "the server is shutting down")
        assert request.request_id not in self._tickets, f"request id {request.request_id} is in use"
        if not self._tickets:
            self._last_heard = time.monotonic()  # idle engines have nothing to report
        ticket = Ticket(request, mailbox, slot)
        self._tickets[request.request_id] = ticket
        self._transport.write(wire.frame(wire.Submit(request)))
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Forget a request; no more news of it comes. Does nothing when it has ended."""
        if self._tickets.pop(ticket.request.request_id, None) is not None and self._transport is not None:
            self._transport.write(wire.frame(wire.Cancel(ticket.request.request_id)))

    def fail_all(self, reason: FinishReason, message: str) -> None:
        """End every open request from this side, with a message for its client."""
        tickets, self._tickets = self._tickets, {}
        now = time.monotonic()
        for ticket in tickets.values():
            delta = Delta(
                request_id=ticket.request.request_id,
                time=now,
                index=len(ticket.delivered),
                finish=reason,
                message=message,
            )
            ticket.mailbox.put(ticket.slot, delta)

    async def close(self, patience: float = 5.0) -> int | None:
        """Ask the engine to leave, wait, make it leave if it does not. Returns its exit status (negative: a signal)."""
        self._closing = True
        process = self._handle.process
        self.fail_all(FinishReason.ABORT, "the server is shutting down")
        if self._transport is not None and not self._transport.is_closing():
            if self._is_ready():
                self._transport.write(wire.frame(wire.Stop()))
            else:
                process.terminate()  # a loading engine does not read its messages
        wait = asyncio.get_running_loop().run_in_executor
        for last_resort in (process.terminate, process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                await wait(None, lambda: process.wait(patience))
                break
            last_resort()
        if self._transport is not None:
            self._transport.close()
        return await wait(None, process.wait)

    def kill(self) -> None:
        """End the engine process at once."""
        self._handle.process.kill()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is in the loop's hands."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes from the engine."""
        self._last_heard = time.monotonic()
        for body in self._frames.feed(data):
            match wire.from_engine.decode(body):
                case wire.News() as news:
                    self._take(news)
                case wire.Loading(what=what, share=share):
                    self._on_progress(what, share)
                case wire.Ready() as ready:
                    self._ready.set_result(ready)
                case wire.Failed(message=message):
                    self._last_words = message

    def connection_lost(self, error: Exception | None) -> None:
        """The engine is gone, or our end was closed."""
        if not self._closing:
            self._die(error)

    def _take(self, news: wire.News) -> None:
        assert news.incarnation == self._handle.incarnation, (
            f"news from engine {news.incarnation} on the connection to engine {self._handle.incarnation}"
        )
        self.stats = news.stats
        self.on_news(news)
        for delta in news.deltas:
            ticket = self._tickets.get(delta.request_id)
            if ticket is None:
                continue  # aborted meanwhile
            if delta.tokens:
                expected = len(ticket.delivered)
                assert delta.index == expected, f"{delta.request_id}: output {delta.index} arrives, {expected} is next"
                ticket.delivered += delta.tokens
            if delta.finish is not None:
                del self._tickets[delta.request_id]
            ticket.mailbox.put(ticket.slot, delta)

    def _is_ready(self) -> bool:
        return self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None

    def _die(self, error: Exception | None) -> None:
        # Where automatic restart goes: launch the next incarnation and submit every ticket with its delivered tokens.
        try:
            status: int | None = self._handle.process.wait(0.5)
        except subprocess.TimeoutExpired:
            status = None
        if self._last_words:
            self.problem = self._last_words
        elif error is not None:
            self.problem = f"the connection to the engine process broke: {error}"
        elif status is not None and status < 0:
            self.problem = f"the engine process was killed by signal {-status}"
        else:
            self.problem = f"the engine process has gone with status {status}"
        if not self._ready.done():
            self._ready.set_exception(EngineError(self.problem))
            return
        self.dead.set()
        self.fail_all(FinishReason.ERROR, f"the engine has failed: {self.problem}")
