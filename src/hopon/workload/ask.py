"""What is asked, and when: lengths, arrivals and shared pieces of prompts.

An :class:`Ask` is a request without its token ids. It carries the true output length, which a scheduler must not see:
:meth:`Ask.request` makes the core's request of it, without that length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from random import Random

from hopon.core.types import Request, SamplingParams

END_TOKEN = -1
"""The token with which a simulated device ends a request."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` consecutive prompt tokens. Pieces of one id hold the same tokens, from their beginning."""

    token: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request to be.

    Args:
        number: place in the workload; becomes the request's id and seed.
        arrival: seconds from the workload's beginning.
        input_tokens: length of the prompt, at least 1.
        output_tokens: tokens that it will really generate, at least 1.
        max_tokens: limit that its user gives; None for none.
        priority: smaller goes first.
        kind: its class in a mix; empty where there is no mix.
        shared: leading pieces of its prompt that others may have, too; what is left is its own.
    """

    number: int
    arrival: float
    input_tokens: int
    output_tokens: int
    max_tokens: int | None
    priority: int = 0
    kind: str = ""
    shared: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        if not (isfinite(self.arrival) and self.arrival >= 0):
            raise ValueError(f"an arrival must be at least 0 seconds, got {self.arrival}")
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 or None, got {self.max_tokens}")
        if sum(piece.count for piece in self.shared) > self.input_tokens:
            raise ValueError(f"the shared pieces {self.shared} are longer than the prompt of {self.input_tokens}")

    def pieces(self) -> list[Piece]:
        """The whole prompt."""
        own = self.input_tokens - sum(piece.count for piece in self.shared)
        return [*self.shared, *([Piece(2 * self.number, own)] if own else [])]

    def prompt(self, vocab_size: int | None = None) -> tuple[int, ...]:
        """Made-up ids. Without a vocabulary a piece is one id again and again; with one, ids below its size."""
        ids: list[int] = []
        for piece in self.pieces():
            if vocab_size is None:
                ids += [piece.token] * piece.count
            else:
                ids += Random(piece.token).choices(range(vocab_size), k=piece.count)
        return tuple(ids)

    def request(self) -> Request:
        """The core's request. It ends at ``max_tokens`` or with an END_TOKEN that only the device knows of."""
        return Request(
            request_id=str(self.number),
            prompt=self.prompt(),
            params=SamplingParams(temperature=0.0, max_tokens=self.max_tokens),
            seed=self.number,
            arrival=self.arrival,
            priority=self.priority,
            stop_token_ids=(END_TOKEN,),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Asks in order of arrival, and what was done to them."""

    name: str
    asks: tuple[Ask, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.asks:
            raise ValueError(f"workload {self.name}: no requests in it")
        for before, after in zip(self.asks, self.asks[1:], strict=False):
            if after.arrival < before.arrival:
                raise ValueError(f"workload {self.name}: {after.arrival} s follows {before.arrival} s")

    def __iter__(self) -> Iterator[Ask]:
        return iter(self.asks)

    def __len__(self) -> int:
        return len(self.asks)

    @property
    def output_lengths(self) -> list[int]:
        """True output lengths, for a simulated device and for nobody else."""
        return [ask.output_tokens for ask in self.asks]

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output, as its user limits it."""
        return max(ask.input_tokens + max(ask.output_tokens, ask.max_tokens or 0) for ask in self.asks)

    def first(self, count: int) -> Workload:
        """The first ``count`` requests."""
        if count < 1:
            raise ValueError(f"a workload needs at least 1 request, got {count}")
        note = (f"the first {count} of {len(self.asks)} requests",) if count < len(self.asks) else ()
        return replace(self, asks=self.asks[:count], notes=self.notes + note)

    def busiest(self, count: int) -> Workload:
        """The ``count`` requests in a row that arrive in the shortest time, from 0 on."""
        if count < 1:
            raise ValueError(f"a workload needs at least 1 request, got {count}")
        if count >= len(self.asks):
            return self
        times = [ask.arrival for ask in self.asks]
        first = min(range(len(times) - count + 1), key=lambda i: times[i + count - 1] - times[i])
        asks = tuple(
            replace(ask, number=number, arrival=ask.arrival - times[first])
            for number, ask in enumerate(self.asks[first : first + count])
        )
        note = f"the busiest {count} of {len(self.asks)} requests in a row, from second {times[first]:.0f} on"
        return replace(self, asks=asks, notes=(*self.notes, note))

    def scaled(self, rate: float = 1.0, length: float = 1.0) -> Workload:
        """Arrivals ``rate`` times as fast, prompts and outputs ``length`` times as long (rounded, at least 1 token)."""
        for name, factor in (("rate", rate), ("length", length)):
            if not (isfinite(factor) and factor > 0):
                raise ValueError(f"the {name} scale must be above 0, got {factor}")
        notes = []
        if rate != 1:
            notes.append(f"arrivals {rate:g} times as fast")
        if length != 1:
            notes.append(f"lengths scaled by {length:g}")
        asks = tuple(_scaled(ask, rate, length) for ask in self.asks)
        return replace(self, asks=asks, notes=self.notes + tuple(notes))

    def limited(self, max_tokens: int | None) -> Workload:
        """Every user gives this limit, whatever the output will be; a longer output is cut there."""
        cut = 0 if max_tokens is None else sum(ask.output_tokens > max_tokens for ask in self.asks)
        note = f"max_tokens {max_tokens} given by every user" + (f", which cuts {cut} outputs" if cut else "")
        asks = tuple(replace(ask, max_tokens=max_tokens) for ask in self.asks)
        return replace(self, asks=asks, notes=(*self.notes, note))


def _scaled(ask: Ask, rate: float, length: float) -> Ask:
    def scale(count: int) -> int:
        return max(1, round(count * length))

    shared = []
    passed = used = 0
    for piece in ask.shared:  # borders are scaled, so that equal beginnings stay equal
        passed += piece.count
        border = min(round(passed * length), scale(ask.input_tokens))
        if border > used:
            shared.append(Piece(piece.token, border - used))
        used = border
    return replace(
        ask,
        arrival=ask.arrival / rate,
        input_tokens=scale(ask.input_tokens),
        output_tokens=scale(ask.output_tokens),
        max_tokens=None if ask.max_tokens is None else scale(ask.max_tokens),
        shared=tuple(shared),
    )
