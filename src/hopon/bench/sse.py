"""Server-sent events from bytes, by the WHATWG rules."""

from __future__ import annotations


class EventReader:
    """The data of events, however the network cut or merged them.

    Lines end with LF, CRLF or CR, data lines of one event are joined with LF, an empty line ends the event, comments
    and other fields are of no interest here.
    """

    __slots__ = ("_buffer", "_data")

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, read: bytes) -> list[bytes]:
        """Data of the events that these bytes complete. A CR at the very end waits: an LF may still belong to it."""
        buffer = self._buffer + read
        if b"\r" in buffer:
            held = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            held = b""
        *lines, rest = buffer.split(b"\n")
        self._buffer = rest + held
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
