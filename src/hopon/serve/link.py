"""One engine process and the socket to it: start it, read its messages, notice its end.

It knows one engine; what becomes of requests when that one dies is :mod:`hopon.serve.client`'s.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from hopon.core.config import EngineOptions
from hopon.serve import wire

Progress = Callable[[str, float], None]
"""Called while the engine loads: (what is being done, share done in [0, 1])."""


class EngineError(Exception):
    """The engine cannot be started, or has died. The message is for the user."""


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


class Link(asyncio.Protocol):
    """The connection to one engine process. Made by :meth:`open`.

    Args:
        handle: a launched process.
        on_progress: told what the engine is doing while it loads.
    """

    def __init__(self, handle: EngineHandle, on_progress: Progress | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.handle = handle
        self.ready: asyncio.Future[wire.Ready] = loop.create_future()
        """Done when the engine takes requests."""
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the connection is gone, with all that came through it read."""
        self.step: tuple[str, ...] = ()
        """Requests in the step that runs now, or ran last."""
        self.last_words = ""
        """Why it goes, when that is known."""
        self.last_heard = time.monotonic()
        """When it last did something: loaded a part, or completed an iteration."""
        self.on_news: Callable[[wire.News], None] = lambda news: None
        """Told of every iteration that has news. There is none before something is sent."""
        self._on_progress = on_progress or (lambda what, share: None)
        self._frames = wire.Frames()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, handle: EngineHandle, on_progress: Progress | None = None) -> Link:
        """Connect to a launched engine, which may be loading still."""
        handle.sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: cls(handle, on_progress), sock=handle.sock)
        return link

    @property
    def is_ready(self) -> bool:
        """It takes requests."""
        return self.ready.done() and not self.lost.done()

    async def until_ready(self) -> wire.Ready:
        """Wait until it has loaded.

        Raises:
            EngineError: it died before; the message says why.
        """
        await asyncio.wait((self.ready, self.lost), return_when=asyncio.FIRST_COMPLETED)
        if not self.ready.done():
            raise EngineError(await self.obituary())
        return self.ready.result()

    async def obituary(self) -> str:
        """Why the engine is gone; ends the process where only the connection is."""
        status = await self.exit_status(0.5)
        if self.last_words:
            return self.last_words
        if status < 0:
            return f"the engine process was killed by signal {-status}"
        return f"the engine process has gone with status {status}"

    def send(self, message: wire.ToEngine) -> None:
        """Tell the engine; nothing comes of it when the connection is going or gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.frame(message))

    def kill(self, why: str) -> None:
        """End the process at once."""
        self.last_words = why
        self.handle.process.kill()

    async def exit_status(self, patience: float) -> int:
        """Wait for the end of the process and make it end if it does not. Negative: the number of a signal."""
        process = self.handle.process
        wait = asyncio.get_running_loop().run_in_executor
        try:
            return await wait(None, process.wait, patience)
        except subprocess.TimeoutExpired:
            process.kill()
            return await wait(None, process.wait)

    def close(self) -> None:
        """Close our end."""
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is in the loop's hands."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes from the engine. Whatever is wrong with them ends the connection."""
        try:
            for body in self._frames.feed(data):
                self._receive(wire.from_engine.decode(body))
        except (ConnectionError, ValueError, msgspec.MsgspecError) as error:
            self.last_words = f"the engine process sent what makes no sense: {error}"
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """The engine is gone, or our end was closed."""
        self.lost.set_result(None)

    def _receive(self, message: wire.FromEngine) -> None:
        match message:
            case wire.News() | wire.Step() if message.incarnation != self.handle.incarnation:
                raise ConnectionError(f"engine {message.incarnation} on the connection to {self.handle.incarnation}")
            case wire.News():
                self.last_heard = time.monotonic()
                self.on_news(message)
            case wire.Step(request_ids=request_ids):
                self.step = request_ids
            case wire.Loading(what=what, share=share):
                self.last_heard = time.monotonic()
                self._on_progress(what, share)
            case wire.Ready():
                self.last_heard = time.monotonic()
                self.ready.set_result(message)
            case wire.Failed(message=words):
                self.last_words = words
