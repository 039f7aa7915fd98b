"""Messages between the API process and the engine process: framed msgpack on a stream socket.

A frame is its length (four bytes, little endian) and one message. The engine sends one message per iteration with the
news of all requests; texts never travel, token ids do. It knows message shapes only; who answers what is in
:mod:`hopon.serve.client` and :mod:`hopon.serve.process`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.engine import EngineStats
from hopon.core.types import Delta, Request
from hopon.serve.notes import Notes

MAX_FRAME = 1 << 28
"""Bytes; a longer frame can only be a damaged stream."""


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """First message to an engine process: what to load. ``factory`` is "package.module:function".

    With ``traces`` the notes say what each request computes.
    """

    factory: str
    options: EngineOptions
    incarnation: int
    traces: bool = False


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A request to serve."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Forget a request."""

    request_id: str


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Leave."""


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Progress of the factory; ``share`` in [0, 1]."""

    what: str
    share: float


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine takes requests from now on."""

    config: SchedulerConfig
    summary: dict[str, str | int | float]
    incarnation: int


class News(msgspec.Struct, frozen=True, array_like=True, tag="news"):
    """What one iteration brought. ``incarnation`` tells this engine from a predecessor."""

    incarnation: int
    deltas: list[Delta]
    stats: EngineStats
    notes: Notes = Notes()


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The requests of the step that runs next; sent before it runs, when they are others than those of the last one.

    What was written to a socket can be read when its writer has been killed, so it is known in whose step that was.
    """

    incarnation: int
    request_ids: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Last words: what went wrong; ``expected`` for bad files and values, else there is a traceback in the message."""

    message: str
    expected: bool


ToEngine = Start | Submit | Cancel | Stop
FromEngine = Loading | Ready | Step | News | Failed

encoder = msgspec.msgpack.Encoder()
to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """The bytes of one message."""
    body = encoder.encode(message)
    assert len(body) <= MAX_FRAME, f"a message of {len(body)} bytes is longer than a frame may be ({MAX_FRAME})"
    return len(body).to_bytes(4, "little") + body


class Frames:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Bodies of the frames that are complete by now.

        Raises:
            ValueError: the stream is damaged.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= 4:
                size = int.from_bytes(buffer[start : start + 4], "little")
                if size > MAX_FRAME:
                    raise ValueError(f"a frame of {size} bytes is longer than {MAX_FRAME}: the stream is damaged")
                if len(buffer) - start - 4 < size:
                    break
                body = bytes(buffer[start + 4 : start + 4 + size])
                start += 4 + size
                yield body
        finally:
            del buffer[:start]
