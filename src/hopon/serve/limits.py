"""Who is let in: the queue's limits, who waits, and when to come back.

It knows numbers and is told what time it is; nothing of HTTP or engines. A request takes its places before its text is
cut into tokens, when only bounds of their number are known, and corrects them afterwards, so that a burst cannot slip
in between the check and the count. The queue is what has no seat yet: a place that waits beyond the free seats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, exp

from hopon.core.config import SchedulerConfig

QUEUE_PER_SEAT = 16
FEWEST_QUEUED = 1024
QUEUE_PER_POOL = 32

MEMORY = 30.0
"""Seconds; what was measured so long ago counts 1/e."""

GUESS = 5
"""Seconds to come back in while nothing has been measured."""

LONGEST = 60
"""Most seconds that anybody is told to wait; common clients take no notice of more."""


class Cause(StrEnum):
    """Why somebody was turned away."""

    REQUESTS = "max_queued_requests"
    TOKENS = "max_queued_tokens"
    CLOSED = "closed"  # the server ends or its engine has gone


class TurnedAwayError(Exception):
    """There is no place. ``retry_after`` is in whole seconds."""

    def __init__(self, cause: Cause, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.cause = cause
        self.retry_after = retry_after


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of the queue; seconds. A time limit of 0 is none.

    Args:
        max_queued_requests: most that wait beyond the free seats; every output of a request counts.
        max_queued_tokens: most prompt tokens of those that wait. An empty queue takes any prompt.
        queue_timeout: longest wait for a seat.
        request_timeout: longest time from arrival to the end.

    Raises:
        ValueError: names the value and the limit.
    """

    max_queued_requests: int
    max_queued_tokens: int
    queue_timeout: float = 600.0
    request_timeout: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (
            ("max_queued_requests", 0),
            ("max_queued_tokens", 1),
            ("queue_timeout", 0),
            ("request_timeout", 0),
        ):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def default_queue(config: SchedulerConfig) -> tuple[int, int]:
    """Requests and tokens that may wait where nobody says: 16 for every seat but at least 1,024, and 32 pools full."""
    return max(FEWEST_QUEUED, QUEUE_PER_SEAT * config.max_num_seqs), QUEUE_PER_POOL * config.capacity_tokens


class DrainRate:
    """How fast requests leave while others wait: requests and their prompt tokens per second.

    Both are averages over the time in which somebody waited, older time counting less; without a queue there is
    nothing to measure.
    """

    def __init__(self, memory: float = MEMORY) -> None:
        self._memory = memory
        self._seconds = 0.0
        self._requests = 0.0
        self._tokens = 0.0
        self._last: float | None = None

    def pass_time(self, now: float, waiting: bool) -> None:
        """It is ``now``; since the last call somebody waited or nobody did."""
        if self._last is not None and waiting and now > self._last:
            fading = exp((self._last - now) / self._memory)
            self._requests *= fading
            self._tokens *= fading
            self._seconds = self._seconds * fading + self._memory * (1 - fading)
        self._last = now

    def count(self, num_tokens: int) -> None:
        """A request has left while others waited."""
        self._requests += 1
        self._tokens += num_tokens

    @property
    def is_known(self) -> bool:
        """Whether a second of waiting, or a departure, has been seen."""
        return self._seconds > 0 and (self._requests > 0 or self._seconds >= 1)

    @property
    def requests(self) -> float:
        """Requests per second."""
        return self._requests / self._seconds if self._seconds > 0 else 0.0

    @property
    def tokens(self) -> float:
        """Prompt tokens per second."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class Place:
    """One request's place, in the queue at first, then in a seat."""

    __slots__ = ("_gate", "is_open", "is_waiting", "num_tokens", "since")

    def __init__(self, gate: Gate, num_tokens: int, since: float) -> None:
        self._gate = gate
        self.num_tokens = num_tokens
        self.since = since
        self.is_waiting = True
        self.is_open = True

    def start(self, now: float) -> None:
        """It has a seat. Does nothing the second time: whoever loses a seat has been let in already."""
        if self.is_open and self.is_waiting:
            self._gate._pass_time(now)
            self.is_waiting = False
            self._gate._move(self, waiting=-1, running=1)

    def leave(self, now: float) -> None:
        """It has ended. Does nothing the second time."""
        if self.is_open:
            self._gate._pass_time(now)
            self.is_open = False
            if self._gate.num_waiting:
                self._gate.rate.count(self.num_tokens)
            self._gate._move(self, waiting=-self.is_waiting, running=-(not self.is_waiting))


class Claim:
    """The places of one HTTP request."""

    def __init__(self, gate: Gate, places: Sequence[Place]) -> None:
        self._gate = gate
        self.places = places

    @property
    def is_waiting(self) -> bool:
        """Whether any of them has no seat yet."""
        return any(place.is_open and place.is_waiting for place in self.places)

    def correct(self, num_tokens: Sequence[int], now: float) -> None:
        """The tokens are counted now, one number for every place.

        Raises:
            TurnedAwayError: with what they really are, the queue is too long.
        """
        gate = self._gate
        gate.waiting_tokens += sum(num_tokens) - sum(place.num_tokens for place in self.places)
        for place, count in zip(self.places, num_tokens, strict=True):
            place.num_tokens = count
        others = gate.waiting_tokens - sum(num_tokens)
        gate._check_tokens(others, sum(num_tokens), len(self.places), now)

    def leave(self, now: float) -> None:
        """All of them are given back."""
        for place in self.places:
            place.leave(now)


class Gate:
    """Counts who waits and who runs, and turns away what is over the limits.

    Args:
        limits: see there.
        num_seats: most that run at once.
    """

    def __init__(self, limits: Limits, num_seats: int) -> None:
        self.limits = limits
        self.num_seats = num_seats
        self.rate = DrainRate()
        self._waiting: dict[Place, None] = {}
        self.num_waiting = 0
        self.num_running = 0
        self.waiting_tokens = 0
        self.turned_away = dict.fromkeys(Cause, 0)
        self.closed = ""
        """Why nobody is let in any more; empty while the gate is open."""
        self._promised = 0.0  # requests that were told to come back and may be on their way

    @property
    def oldest(self) -> float | None:
        """When the oldest of those who wait came; None when nobody does."""
        return min((place.since for place in self._waiting), default=None)

    def close(self, message: str) -> None:
        """Nobody is let in any more."""
        self.closed = message

    def check(self, now: float, num_requests: int = 1) -> None:
        """Raise TurnedAwayError unless so many more requests may wait."""
        if self.closed:
            self.turned_away[Cause.CLOSED] += num_requests
            raise TurnedAwayError(Cause.CLOSED, self.closed, GUESS)
        self._pass_time(now)
        limit = self.limits.max_queued_requests
        free = max(0, self.num_seats - self.num_running)
        excess = self.num_waiting + num_requests - free - limit
        # Several outputs that alone are over the limit may still come when nobody else waits.
        if excess > 0 and (self.num_waiting or free < min(num_requests, self.num_seats)):
            self._turn_away(
                Cause.REQUESTS,
                num_requests,
                f"the queue is full: {self.num_waiting} requests wait and {free} of {self.num_seats} seats are free; "
                f"{num_requests} more would be over max_queued_requests {limit}",
                self._seconds(excess, self.rate.requests),
            )

    def time_to_drain(self) -> int:
        """Whole seconds until those who wait now have had their turn."""
        return min(max(1, ceil(self._seconds(self.num_waiting, self.rate.requests))), LONGEST)

    def enter(self, num_requests: int, fewest_tokens: int, most_tokens: int, now: float) -> Claim:
        """Places for so many requests, whose prompts together have a number of tokens within bounds.

        Raises:
            TurnedAwayError: there are too many, even with the fewest tokens.
        """
        self.check(now, num_requests)
        self._check_tokens(self.waiting_tokens, fewest_tokens, num_requests, now)
        share, rest = divmod(most_tokens, num_requests)
        places = [Place(self, share + (i < rest), now) for i in range(num_requests)]
        self._waiting.update(dict.fromkeys(places))
        self.num_waiting += num_requests
        self.waiting_tokens += most_tokens
        return Claim(self, places)

    @contextmanager
    def entering(self, num_requests: int, fewest_tokens: int, most_tokens: int, now: float) -> Iterator[Claim]:
        """As :meth:`enter`; the places are given back where the block raises."""
        claim = self.enter(num_requests, fewest_tokens, most_tokens, now)
        try:
            yield claim
        except BaseException:
            claim.leave(now)
            raise

    def _check_tokens(self, others: int, num_tokens: int, num_requests: int, now: float) -> None:
        limit = self.limits.max_queued_tokens
        if not others or others + num_tokens <= limit:
            return
        self._pass_time(now)
        self._turn_away(
            Cause.TOKENS,
            num_requests,
            f"the queue is full: {others} prompt tokens wait; {num_tokens} more would be over "
            f"max_queued_tokens {limit}",
            self._seconds(others + num_tokens - limit, self.rate.tokens),
        )

    def _turn_away(self, cause: Cause, num_requests: int, message: str, seconds: float) -> None:
        """Everybody who was sent away is given a later time than those before, as the queue will have room for them."""
        if self.rate.is_known:
            seconds += self._seconds(self._promised, self.rate.requests)
        retry_after = min(max(1, ceil(seconds)), LONGEST)
        self._promised += num_requests
        self.turned_away[cause] += num_requests
        raise TurnedAwayError(cause, f"{message}. Try again in {retry_after} s", retry_after)

    def _seconds(self, excess: float, rate: float) -> float:
        if not self.rate.is_known:
            return GUESS
        return excess / rate if rate > 0 else LONGEST

    def _pass_time(self, now: float) -> None:
        before = self.rate._last
        self.rate.pass_time(now, self.num_waiting > 0)
        if before is not None and now > before:
            self._promised = max(0.0, self._promised - (now - before) * self.rate.requests)

    def _move(self, place: Place, waiting: int, running: int) -> None:
        if waiting:
            del self._waiting[place]
        self.num_waiting += waiting
        self.num_running += running
        self.waiting_tokens += waiting * place.num_tokens
