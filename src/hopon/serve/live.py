"""The running engine as a page shows it: who sits where in each step, who waits, and how long tokens take.

It is made of what the engine process tells anyway, and only while somebody looks; else all it does is to remember who
has a seat. Seats are numbered here (the lowest free one is given), requests in the order in which they got one. What
was asked or answered is never shown. Times are milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hopon.metrics import percentiles
from hopon.serve import wire
from hopon.serve.client import EngineClient, Ticket

PERIOD = 0.25
"""Seconds between two messages to a page."""

WINDOW = 15.0
"""Seconds of which percentiles are told."""

MOST_VALUES = 2000
MOST_STEPS = 500
"""In one message; of more the newest."""

MOST_WAITING = 40
MOST_WATCHERS = 16

PREFILL, DECODE, AGAIN, HELD, EMPTY = "pdah."


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One step: when it ended, how long it took, its tokens, who waits for what, and a letter for each seat.

    ``who``: (seat, request) where that has changed; request 0 has left.
    """

    at: float
    milliseconds: float
    tokens: int
    waiting: tuple[int, int, int, int]
    seats: str
    who: list[tuple[int, int]]
    preempted: int


@dataclass(eq=False, slots=True)
class _Watcher:
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))


class Live:
    """Watches one client.

    Args:
        client: of the engine; told of its news by :meth:`hear`.
        name: of the model.
    """

    def __init__(self, client: EngineClient, name: str) -> None:
        self._client = client
        self._name = name
        self._seats: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._incarnation = 0
        self._count = 0
        self._shown = [0] * client.config.max_num_seqs
        self._watchers: list[_Watcher] = []
        self._heard: dict[str, float] = {}  # when a request's newest token came
        self._ttft: deque[tuple[float, float]] = deque(maxlen=MOST_VALUES)
        self._itl: deque[tuple[float, float]] = deque(maxlen=MOST_VALUES)

    @property
    def is_full(self) -> bool:
        """Nobody else may look."""
        return len(self._watchers) >= MOST_WATCHERS

    def hear(self, news: wire.News, now: float) -> None:
        """News of a step, before its deltas are handed out."""
        notes = news.notes
        if news.incarnation != self._incarnation:
            self._incarnation = news.incarnation
            self._seats.clear()
        for name in notes.preempted:
            self._seats.pop(name, None)
        if notes.admitted:
            self._seat(notes.admitted)
        if self._watchers:
            self._note(news, now)

    def _seat(self, names: Iterable[str]) -> None:
        gone = [name for name in self._seats if self._client.ticket(name) is None]
        for name in gone:
            del self._seats[name]
        self._numbers = {name: n for name, n in self._numbers.items() if self._client.ticket(name) is not None}
        taken = set(self._seats.values())
        free = (seat for seat in range(len(self._shown)) if seat not in taken)
        for name, seat in zip([name for name in names if name not in self._seats], free, strict=False):
            self._seats[name] = seat
            self._number(name)

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._count += 1
            self._numbers[name] = self._count
        return self._numbers[name]

    def _note(self, news: wire.News, now: float) -> None:
        members = frozenset(self._client.step_members)
        letters = [EMPTY] * len(self._shown)
        fresh = {delta.request_id: delta.index for delta in news.deltas if delta.tokens}
        numbers = [0] * len(self._shown)
        for name, seat in self._seats.items():
            ticket = self._client.ticket(name)
            if ticket is None:
                continue
            numbers[seat] = self._numbers[name]
            if name in fresh:
                letters[seat] = DECODE if fresh[name] else PREFILL
            elif name in members:
                letters[seat] = AGAIN if ticket.delivered else PREFILL
            else:
                letters[seat] = HELD
            if name in fresh:
                self._time(name, ticket, fresh[name], now)
        notes = news.notes
        if notes.num_rows:
            seconds = notes.seconds
            step = Step(
                round(1e3 * now, 1),
                round(1e3 * (seconds.plan + seconds.compute + seconds.commit), 2),
                notes.num_tokens,
                (notes.waiting.seats, notes.waiting.tokens, notes.waiting.blocks, notes.waiting.order),
                "".join(letters),
                [(seat, number) for seat, number in enumerate(numbers) if number != self._shown[seat]],
                len(notes.preempted),
            )
            self._shown = numbers
            for watcher in self._watchers:
                watcher.steps.append(step)
        for delta in news.deltas:
            if delta.finish is not None:
                self._seats.pop(delta.request_id, None)
                self._heard.pop(delta.request_id, None)

    def _time(self, name: str, ticket: Ticket, index: int, now: float) -> None:
        if index == 0:
            self._ttft.append((now, now - ticket.request.arrival))
        elif name in self._heard:
            self._itl.append((now, now - self._heard[name]))
        self._heard[name] = now

    async def follow(self) -> AsyncIterator[bytes]:
        """Server-sent events for one page, until the server leaves; the first one tells what it is."""
        watcher = _Watcher()
        if not self._watchers:
            self._heard.clear()
        self._watchers.append(watcher)
        try:
            yield _event(self._hello())
            quiet = 0
            while not self._client.refusal and not self._client.dead.is_set():
                await asyncio.sleep(PERIOD)
                quiet = 0 if watcher.steps or self._client.num_open else quiet + 1
                if quiet % 4 == 0:
                    yield _event(self._message(watcher))
        finally:
            self._watchers.remove(watcher)

    def _hello(self) -> dict[str, Any]:
        config = self._client.config
        self._seat(())
        return {
            "model": self._name,
            "seats": config.max_num_seqs,
            "budget": config.max_num_batched_tokens,
            "blocks": config.num_blocks,
            "now": round(1e3 * time.monotonic(), 1),
            "who": [(seat, number) for seat, number in enumerate(self._shown) if number],
        }

    def _message(self, watcher: _Watcher) -> dict[str, Any]:
        now = time.monotonic()
        steps = list(watcher.steps)
        watcher.steps.clear()
        stats = self._client.stats
        waiting = [ticket for ticket in self._client.open_tickets if ticket.request.request_id not in self._seats]
        seated = [ticket for name in self._seats if (ticket := self._client.ticket(name)) is not None]
        return {
            "now": round(1e3 * now, 1),
            "steps": steps,
            "running": len(seated),
            "waiting": len(waiting),
            "used": 0.0 if stats is None else stats.num_used_blocks / self._client.config.num_blocks,
            "queue": [self._about(ticket, now) for ticket in waiting[:MOST_WAITING]],
            "requests": [self._about(ticket, now) for ticket in seated],
            "ttft": _shares(self._ttft, now),
            "itl": _shares(self._itl, now),
            "deaths": self._client.num_deaths,
        }

    def _about(self, ticket: Ticket, now: float) -> tuple[int, int, int, int, float]:
        """(number, prompt tokens, output tokens so far, most that it may have, milliseconds since its arrival)."""
        request = ticket.request
        return (
            self._number(request.request_id),
            len(request.prompt),
            len(ticket.delivered),
            request.params.max_tokens or 0,
            round(1e3 * (now - request.arrival), 1),
        )


def _shares(values: deque[tuple[float, float]], now: float) -> tuple[float, float, int] | None:
    """(p50, p95, count) of the window, in milliseconds."""
    while values and values[0][0] < now - WINDOW:
        values.popleft()
    if not values:
        return None
    p50, p95 = (round(1e3 * (value or 0.0), 2) for value in percentiles([value for _, value in values], (50, 95)))
    return p50, p95, len(values)


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
