"""The lives of requests, step by step, kept for a while for those who ask. Counts and times, never what was said."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from hopon.serve import wire

MAX_TRACES = 256
MAX_EVENTS = 4096


@dataclass(kw_only=True, slots=True)
class Trace:
    """What happened to one HTTP request.

    Args:
        id: of the answer.
        key: name of the API key; others do not get to see it.
        arrival: seconds on the monotonic clock; events count from it.
        events: in order, at most ``MAX_EVENTS``.
        num_dropped: events beyond those.
        incarnation: of the engine that has it.
    """

    id: str
    key: str | None
    arrival: float
    events: list[dict[str, Any]] = field(default_factory=list)
    num_dropped: int = 0
    incarnation: int | None = None

    def note(self, what: str, output: int, now: float, **facts: Any) -> None:
        """Add an event of one output."""
        if len(self.events) >= MAX_EVENTS and what != "finished":
            self.num_dropped += 1
            return
        self.events.append({"at": round(now - self.arrival, 6), "event": what, "output": output, **facts})

    def shown(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"id": self.id, "object": "request.trace", "events": self.events, "dropped_events": self.num_dropped}


class Traces:
    """The newest traces, open requests first."""

    def __init__(self) -> None:
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._open: dict[str, tuple[Trace, int]] = {}

    def begin(self, trace: Trace, request_ids: list[str], num_tokens: list[int], now: float) -> None:
        """A request is queued; its outputs have these names in the engine."""
        self._traces[trace.id] = trace
        self._traces.move_to_end(trace.id)
        while len(self._traces) > MAX_TRACES:
            self._traces.popitem(last=False)
        for output, (name, count) in enumerate(zip(request_ids, num_tokens, strict=True)):
            self._open[name] = trace, output
            trace.note("queued", output, now, prompt_tokens=count)

    def hear(self, news: wire.News, now: float) -> None:
        """What the engine tells of a step."""
        notes, found = news.notes, self._open
        for name in notes.preempted:
            if name in found:
                trace, output = found[name]
                trace.note("preempted", output, now)
        for name in notes.admitted:
            if name in found:
                trace, output = found[name]
                again = trace.incarnation not in (None, news.incarnation)
                trace.incarnation = news.incarnation
                trace.note("replayed" if again else "admitted", output, now)
        for name, start, count in notes.chunks:
            if name in found:
                trace, output = found[name]
                trace.note("computed", output, now, start=start, tokens=count)
        for delta in news.deltas:
            if delta.tokens and delta.request_id in found:
                trace, output = found[delta.request_id]
                trace.note("generated", output, now, index=delta.index, tokens=len(delta.tokens))

    def end(self, request_id: str, reason: str, num_tokens: int, now: float) -> None:
        """An output has ended."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            trace, output = entry
            trace.note("finished", output, now, reason=reason, tokens=num_tokens)

    def get(self, answer_id: str, key: str | None) -> Trace | None:
        """One that this key may see; None where there is none, or it has been dropped."""
        trace = self._traces.get(answer_id)
        return trace if trace is not None and trace.key == key else None
