"""Priorities with aging, and fair shares between users: nobody starves, whatever the others send."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from hopon.core.policy.fairness import MAX_USERS, OUTPUT_TOKEN, PROMPT_TOKEN, FairShare
from hopon.core.policy.presets import make_preset
from hopon.core.policy.systems.hopon import Hopon
from tests.core.harness import Harness, config, request


def harness(num_blocks: int = 64, *, seats: int = 2, **knobs: object) -> Harness:
    settings = config(num_blocks, max_num_seqs=seats)
    return Harness.make(settings, policy=Hopon(**knobs).policy(settings))  # type: ignore[arg-type]


def starts(h: Harness) -> list[str]:
    """Requests in the order in which they first got a seat."""
    by_prompt = {sequence.request.prompt: name for name, sequence in h.scheduler._sequences.items()}
    order: list[str] = []

    def look() -> bool:
        for plan in h.plans[len(seen) :]:
            seen.append(plan)
            order.extend(by_prompt[row.prompt] for row in plan.opened if by_prompt[row.prompt] not in order)
        return not h.scheduler.has_work

    seen: list[object] = []
    h.until(look)
    return order


# ---- aging ----


def test_v010_priority_takes_the_next_seat() -> None:
    """The next free seat goes to the smaller number; equal ones keep their order."""
    h = harness(seats=1)
    h.add(request("first", 4, priority=10))
    h.step()
    h.add(request("low", 4, priority=10), request("high", 4, priority=0), request("high too", 4, priority=0))
    assert starts(h)[-3:] == ["high", "high too", "low"]


def test_overtaking_is_bounded(effort: Callable[[int, int], int]) -> None:
    """Whoever overtakes came within levels times aging of the one overtaken, and whoever may overtake does."""
    for seed in range(effort(30, 1000)):
        rng = random.Random(seed)
        aging = rng.choice([1.0, 5.0, 40.0])
        h = harness(seats=1, aging=aging)
        asked = {
            str(i): request(str(i), 4, 1, priority=rng.randint(-3, 3), arrival=i * rng.choice([1.0, 3.0]))
            for i in range(20)
        }
        h.add(*asked.values())
        order = starts(h)
        moments = [asked[name].arrival + asked[name].priority * aging for name in order]
        assert moments == sorted(moments), f"seed {seed}"
        for i, ahead in enumerate(order):
            for behind in order[i + 1 :]:
                a, b = asked[ahead], asked[behind]
                if a.arrival > b.arrival:
                    assert a.arrival - b.arrival <= (b.priority - a.priority) * aging


@pytest.mark.parametrize(("aging", "starves"), [(5.0, False), (0.0, True)])
def test_a_stream_of_urgent_requests_starves_nobody(aging: float, starves: bool) -> None:
    """Priority 10 behind an endless stream of priority 0: served after 50 s with aging, never without."""
    h = harness(seats=1, aging=aging)
    h.add(request("busy", 4, 4, arrival=0.0), request("low", 4, 4, priority=10, arrival=0.0))
    waited = None
    for i in range(400):
        if h.scheduler.num_waiting < 4:
            h.add(request(f"urgent {i}", 4, 4, arrival=h.now))
        h.step()
        if waited is None and h.outputs.get("low"):
            waited = h.now
    if starves:
        assert waited is None
    else:
        assert waited is not None
        assert 50 <= waited <= 75


def test_v008_the_preempted_go_on_first() -> None:
    """Among equals, who has run before resumes ahead of who came earlier and has not."""
    h = harness(seats=1)
    h.add(request("ran", 4, 20, arrival=5.0))
    h.step()
    sequence = h.scheduler._sequences["ran"]
    other = h.scheduler._sequences
    assert sequence.resumes
    h.add(request("new", 4, arrival=0.0))
    order = h.scheduler.policy.order
    assert order.key(sequence, h.now) < order.key(other["new"], h.now)


def test_bad_aging_is_named() -> None:
    """The knob and the value."""
    with pytest.raises(ValueError, match="aging must be at least 0, got -1"):
        make_preset("hopon", {"aging": "-1"})


# ---- fair shares ----


class Crowd:
    """Users who always have requests waiting; what was done for them is counted from the news."""

    def __init__(self, seed: int, users: dict[str, int], *, fair: bool, num_blocks: int = 40) -> None:
        self.rng = random.Random(seed)
        self.h = harness(num_blocks, seats=4, fair_share=fair)
        self.users = users
        self.count = 0
        self.owners: dict[str, tuple[str, int]] = {}
        self.done: Counter[str] = Counter()

    def top_up(self) -> None:
        waiting = Counter(sequence.request.user for sequence in self.h.scheduler._waiting)
        for user, backlog in self.users.items():
            while waiting[user] < backlog:
                self.count += 1
                waiting[user] += 1
                prompt, output = self.rng.randint(1, 60), self.rng.randint(1, 30)
                self.owners[str(self.count)] = (user, prompt)
                self.h.add(request(str(self.count), prompt, output, user=user))

    def step(self) -> None:
        self.top_up()
        self.h.step()
        self.done = Counter()
        for name, (user, prompt) in self.owners.items():
            tokens = len(self.h.outputs.get(name, ()))
            if tokens:
                self.done[user] += int(PROMPT_TOKEN * prompt + OUTPUT_TOKEN * tokens)


BOUND = 2 * max(PROMPT_TOKEN * 60, OUTPUT_TOKEN * 40 * 16)
"""The paper's: twice the longest prompt, or twice a pool full of output."""


def test_users_who_wait_get_equal_shares(effort: Callable[[int, int], int]) -> None:
    """However many requests each sends, users that always wait are never further apart than the bound."""
    for seed in range(effort(4, 100)):
        crowd = Crowd(seed, {"modest": 1, "eager": 5, "flood": 40}, fair=True)
        for _ in range(400):
            crowd.step()
            if len(crowd.done) == 3:
                assert max(crowd.done.values()) - min(crowd.done.values()) <= BOUND, f"seed {seed}"
        shares = [count / crowd.done.total() for count in crowd.done.values()]
        assert min(shares) > 0.28, f"seed {seed}: {crowd.done}"


def test_without_it_the_flood_wins() -> None:
    """The same crowd, first come, first served: shares follow the number of requests, so the test above can fail."""
    crowd = Crowd(1, {"modest": 1, "eager": 5, "flood": 40}, fair=False)
    for _ in range(400):
        crowd.step()
    assert max(crowd.done.values()) - min(crowd.done.values()) > BOUND
    assert crowd.done["flood"] > 5 * crowd.done["modest"]


def test_one_request_behind_a_flood_is_next() -> None:
    """A newcomer does not wait for those who came before him with a thousand requests."""
    h = harness(seats=1, fair_share=True)
    h.add(*(request(f"flood {i}", 8, 2, user="flood") for i in range(1000)))
    for _ in range(20):
        h.step()
    before = sum(name.startswith("flood") for name in h.finished)
    h.add(request("guest", 8, 2, user="guest"))
    h.until(lambda: "guest" in h.finished)
    assert len(h.finished) - before <= 3


def test_being_away_saves_nothing_up() -> None:
    """A user that comes back after long is served like the others from then on, not alone until it has caught up."""
    h = harness(seats=1, fair_share=True)
    h.add(*(request(f"a{i}", 10, 5, user="a") for i in range(200)), request("b first", 10, 5, user="b"))
    for _ in range(300):
        h.step()
    served = len(h.finished)
    h.add(*(request(f"b{i}", 10, 5, user="b") for i in range(100)))
    h.until(lambda: len(h.finished) >= served + 30)
    recent = list(h.finished)[served:]
    assert 12 <= sum(name.startswith("b") for name in recent) <= 18


def test_several_starts_in_one_step_alternate() -> None:
    """Seats that become free together are not all given to the user who is behind by a little."""
    h = harness(seats=4, fair_share=True)
    h.add(*(request(f"a{i}", 4, 2, user="a") for i in range(4)), *(request(f"b{i}", 4, 2, user="b") for i in range(4)))
    plan = h.step()
    prompts = {request(name, 4).prompt for name in ("a0", "a1", "b0", "b1")}
    assert {row.prompt for row in plan.opened} == prompts


def test_counters_of_the_absent_are_forgotten() -> None:
    """User names are the clients' choice: ever new ones do not fill the memory."""
    h = harness(seats=2, fair_share=True)
    shares = h.scheduler.policy.composition
    assert isinstance(shares, FairShare)
    for i in range(MAX_USERS + 500):
        shares.served[f"user {i}"] = float(i)
    h.add(request("x", 4, 1, user="new"), request("y", 4, 1, user="other"))
    h.run()
    assert len(shares.served) < MAX_USERS
    assert f"user {MAX_USERS + 499}" in shares.served


def test_fair_traces_end(effort: Callable[[int, int], int]) -> None:
    """Random users, priorities, departures and tight memory: every request ends once and nothing leaks."""
    for seed in range(effort(100, 3000)):
        rng = random.Random(seed)
        h = harness(rng.choice([6, 12, 40]), seats=rng.choice([1, 3, 8]), fair_share=True, aging=rng.choice([0.0, 3.0]))
        names = [str(i) for i in range(rng.randint(1, 30))]
        upcoming = list(names)
        while upcoming or h.scheduler.has_work:
            if upcoming and (rng.random() < 0.5 or not h.scheduler.has_work):
                name = upcoming.pop()
                h.add(
                    request(
                        name,
                        rng.randint(1, 80),
                        rng.randint(1, 30),
                        user=rng.choice("abc"),
                        priority=rng.randint(-2, 2),
                        arrival=h.now,
                    )
                )
            if rng.random() < 0.05:
                h.abort(rng.choice(names))
            h.step()
        assert sorted(h.finished) == sorted(names), f"seed {seed}"
        assert h.scheduler.pool.num_free == h.scheduler.pool.num_blocks
