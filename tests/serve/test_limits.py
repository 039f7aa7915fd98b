"""The queue's limits: who is let in, what the others are told, and that nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from hopon.core.config import SchedulerConfig
from hopon.serve.limits import (
    LONGEST,
    Cause,
    Claim,
    DrainRate,
    Gate,
    Limits,
    Place,
    TurnedAwayError,
    default_queue,
)


def gate(requests: int = 4, tokens: int = 10_000, seats: int = 2) -> Gate:
    return Gate(Limits(max_queued_requests=requests, max_queued_tokens=tokens), seats)


def enter(gate: Gate, now: float = 0.0, count: int = 1, tokens: int = 10) -> Claim:
    return gate.enter(count, tokens, tokens, now)


def refusal(gate: Gate, now: float = 0.0, count: int = 1, tokens: int = 10) -> TurnedAwayError:
    with pytest.raises(TurnedAwayError) as caught:
        enter(gate, now, count, tokens)
    return caught.value


class VirtualServer:
    """Serves the first in the queue, each in a fixed time, on a virtual clock."""

    def __init__(self, gate: Gate, service_time: float) -> None:
        self.gate = gate
        self.service_time = service_time
        self.queue: list[Place] = []
        self.serving: list[tuple[float, Place]] = []

    def add(self, claim: Claim, now: float) -> None:
        self.queue += claim.places
        self.work(now)

    def work(self, now: float) -> None:
        """Everything that happens until now."""
        while self.serving and self.serving[0][0] <= now:
            done, place = self.serving.pop(0)
            place.leave(done)
            self._start(done)
        self._start(now)

    def _start(self, now: float) -> None:
        while self.queue and len(self.serving) < self.gate.num_seats:
            place = self.queue.pop(0)
            place.start(now)
            self.serving.append((now + self.service_time, place))
            self.serving.sort(key=lambda entry: entry[0])


def retry_after_overload(service_time: float) -> list[int]:
    """A queue is filled and kept full for 30 s; what those are told who come at the end."""
    door = gate(requests=20, seats=2)
    server = VirtualServer(door, service_time)
    now = 0.0
    told: list[int] = []
    while now < 30:
        try:
            server.add(enter(door, now), now)
        except TurnedAwayError:
            door._promised = 0.0  # nobody comes back here
        now += 0.05
        server.work(now)
    for _ in range(3):
        told.append(refusal(door, now, count=10).retry_after)
    return told


def test_retry_after_follows_the_measured_rate() -> None:
    """Ten requests too many take 10 / 4 seconds at 4 per second and 10 / 0.5 at a half; later ones are told later."""
    fast, slow = retry_after_overload(0.5), retry_after_overload(4.0)
    assert fast[0] == pytest.approx(10 / 4, abs=1.5)
    assert slow[0] == pytest.approx(10 / 0.5, abs=5)
    assert fast == sorted(set(fast)), "those sent away are spread"
    assert slow == sorted(set(slow))


def test_idle_time_does_not_slow_the_rate() -> None:
    """An hour without a queue changes nothing of what was measured while there was one."""
    rate = DrainRate()
    rate.pass_time(0.0, False)
    for second in range(1, 31):
        rate.pass_time(float(second), True)
        rate.count(100)
    before = rate.requests, rate.tokens
    rate.pass_time(3600.0, False)
    assert (rate.requests, rate.tokens) == before
    assert rate.requests == pytest.approx(1.0, rel=0.05)
    assert rate.tokens == pytest.approx(100.0, rel=0.05)


def test_a_stuck_engine_is_not_promised_away() -> None:
    """Where nobody leaves for a long time, the longest time is told, not a guess."""
    door = gate(requests=1, seats=1)
    enter(door).places[0].start(0.0)
    enter(door)
    refusal(door, 0.5)
    assert refusal(door, 60.0).retry_after == LONGEST


def test_free_seats_are_not_a_queue() -> None:
    """With no queue at all, as many are let in as there are seats, whether they have sat down yet or not."""
    door = gate(requests=0, seats=3)
    first = [enter(door) for _ in range(3)]
    assert refusal(door).cause is Cause.REQUESTS
    first[0].places[0].start(1.0)
    refusal(door, 1.0)
    first[0].leave(2.0)
    enter(door, 2.0)


def test_every_output_counts() -> None:
    """n outputs take n places; alone, more of them than places are let in."""
    door = gate(requests=4, seats=2)
    enter(door, count=5)
    refusal(door, count=2)
    enter(door, count=1)
    refusal(door)
    assert door.turned_away[Cause.REQUESTS] == 3
    alone = gate(requests=4, seats=2)
    assert len(enter(alone, count=50).places) == 50


def test_tokens_are_bounded_first_and_counted_later() -> None:
    """Bounds hold places until the count is there; a count that is too high gives the places back."""
    door = gate(requests=100, tokens=1000)
    first = door.enter(1, 10, 900, 0.0)
    assert refusal(door, tokens=200).cause is Cause.TOKENS
    second = door.enter(1, 50, 400, 0.0)
    first.correct([100], 0.0)
    second.correct([500], 0.0)
    third = door.enter(1, 50, 5000, 0.0)
    with pytest.raises(TurnedAwayError, match="600 prompt tokens wait; 401 more"):
        third.correct([401], 0.0)
    third.leave(0.0)
    assert (door.num_waiting, door.waiting_tokens) == (2, 600)


def test_an_empty_queue_takes_any_prompt() -> None:
    """A prompt longer than the whole queue may be is served when nobody waits, else nobody could ever send it."""
    door = gate(tokens=100)
    claim = door.enter(1, 500, 500, 0.0)
    claim.correct([500], 0.0)
    claim.places[0].start(1.0)
    enter(door, 1.0, tokens=600)
    refusal(door, 1.0)


def test_a_closed_gate_says_why() -> None:
    """Nobody is let in any more, and the reason is told."""
    door = gate()
    door.close("the server is shutting down")
    error = refusal(door)
    assert error.cause is Cause.CLOSED
    assert str(error) == "the server is shutting down"


def test_v025_places_are_conserved(effort: Callable[[int, int], int]) -> None:
    """Whatever happens to requests, in whatever order and however often, the counts end at zero."""
    rng = random.Random(1)
    door = gate(requests=10, tokens=500, seats=3)
    claims: list[Claim] = []
    now = 0.0
    for _ in range(effort(3000, 100_000)):
        now += rng.random() * 0.1
        match rng.randrange(5):
            case 0 | 1:
                count, tokens = rng.randint(1, 4), rng.randint(1, 80)
                with suppress(TurnedAwayError), door.entering(count, tokens, tokens * 4, now) as claim:
                    claim.correct([rng.randint(1, tokens) for _ in range(count)], now)
                    claims.append(claim)
            case 2 if claims:
                rng.choice(rng.choice(claims).places).start(now)
            case 3 if claims:
                rng.choice(rng.choice(claims).places).leave(now)
            case 4 if claims:
                claims.pop(rng.randrange(len(claims))).leave(now)
        assert door.num_waiting >= 0 <= door.num_running
        assert door.waiting_tokens >= 0
        open_places = [place for claim in claims for place in claim.places if place.is_open]
        assert door.num_waiting == sum(place.is_waiting for place in open_places)
    for claim in claims:
        claim.leave(now)
    assert (door.num_waiting, door.num_running, door.waiting_tokens) == (0, 0, 0)


def test_defaults_follow_the_engine() -> None:
    """16 requests per seat, at least 1,024; 32 times the tokens of the pool."""
    config = SchedulerConfig(num_blocks=100, max_model_len=64, max_num_seqs=128)
    assert default_queue(config) == (2048, 32 * 1600)
    assert default_queue(SchedulerConfig(num_blocks=100, max_model_len=64, max_num_seqs=2))[0] == 1024


def test_bad_limits_are_named() -> None:
    """The value and the limit."""
    with pytest.raises(ValueError, match="max_queued_requests must be at least 0, got -1"):
        Limits(max_queued_requests=-1, max_queued_tokens=1)
    with pytest.raises(ValueError, match="queue_timeout must be at least 0, got nan"):
        Limits(max_queued_requests=1, max_queued_tokens=1, queue_timeout=float("nan"))
