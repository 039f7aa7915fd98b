"""Who is tried with whom after an engine died: the rule alone, without engines."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from hopon.serve.supervisor import Trials


class World:
    """Engines that die in every step with a deadly request, and when somebody kills them.

    ``trials.group`` is in the engine, or everybody where there is no trial. A step gives each of its requests a token;
    a request has so many tokens to get.
    """

    def __init__(self, num_requests: int, deadly: set[str], tokens: int) -> None:
        self.trials = Trials()
        self.left = {f"r{i}": tokens for i in range(num_requests)}
        self.deadly = deadly
        self.failed: list[str] = []
        self.num_deaths = 0
        self.alone: dict[str, int] = {}  # deaths alone in a step since the last token
        self.tokens_between_deaths: list[int] = []
        self.num_tokens = 0

    def members(self) -> list[str]:
        if not self.trials.undecided and not self.trials.next_group(self.left):
            return list(self.left)
        return [i for i in self.trials.group if i in self.left]

    def step(self, kill: bool = False) -> None:
        members = self.members()
        if kill or self.deadly & set(members):
            self.num_deaths += 1
            self.tokens_between_deaths.append(self.num_tokens)
            self.num_tokens = 0
            if len(members) == 1:
                self.alone[members[0]] = self.alone.get(members[0], 0) + 1
            guilty = self.trials.died(members)
            if guilty is not None:
                assert self.alone[guilty] == 2, f"{guilty} is failed without two deaths alone"
                self.failed.append(guilty)
                del self.left[guilty]
            return
        for i in members:
            self.alone.pop(i, None)
            self.num_tokens += 1
            self.left[i] -= 1
            self.trials.proved(i)
            if not self.left[i]:
                del self.left[i]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 70), st.data())
def test_deadly_requests_are_found_and_nobody_else(num_requests: int, data: st.DataObject) -> None:
    """Whoever is deadly fails, whoever is not gets all its tokens, after a number of deaths that grows with the
    logarithm."""
    names = [f"r{i}" for i in range(num_requests)]
    deadly = data.draw(st.sets(st.sampled_from(names), max_size=3))
    world = World(num_requests, deadly, tokens=3)
    while world.left:
        world.step()
    assert set(world.failed) == deadly
    assert world.num_deaths <= len(deadly) * (math.ceil(math.log2(num_requests)) + 2)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 70), st.lists(st.booleans(), max_size=60))
def test_kills_from_outside_fail_nobody_who_was_not_alone_twice(num_requests: int, kills: list[bool]) -> None:
    """Kills at any moment: all requests end, and only who was alone in the step at two deaths without a token between
    them can be failed (the world asserts that)."""
    world = World(num_requests, set(), tokens=3)
    for kill in kills:
        if world.left:
            world.step(kill)
    for _ in range(1000):
        if world.left:
            world.step()
    assert not world.left


def test_one_deadly_request_among_64_never_exhausts_the_patience() -> None:
    """Between two deaths others get tokens, so that the count of deaths in vain starts anew."""
    for i in range(64):
        world = World(64, {f"r{i}"}, tokens=20)
        while not world.failed:
            world.step()
        in_vain = longest = 0
        for tokens in world.tokens_between_deaths:
            in_vain = 1 if tokens else in_vain + 1
            longest = max(longest, in_vain)
        assert longest < 5
        assert world.num_deaths == 8


def test_who_was_no_suspect_waits_and_is_not_blamed() -> None:
    """Only the requests of the step are tried; a request that ends meanwhile needs no trial."""
    trials = Trials()
    assert trials.died(["a", "b", "c"]) is None
    assert trials.next_group({"a", "b", "c", "d"}) == ["a", "b"]
    trials.proved("a")
    assert trials.undecided
    trials.proved("b")
    assert trials.next_group({"a", "b", "d"}) == [], "c has ended"
    assert not trials.undecided


def test_a_death_before_the_step_of_a_group_blames_nobody() -> None:
    """The group is tried again as it is."""
    trials = Trials()
    trials.died(["a", "b"])
    assert trials.next_group({"a", "b"}) == ["a"]
    assert trials.died([]) is None
    assert trials.next_group({"a", "b"}) == ["a"]
    assert trials.died(["a"]) is None, "its first death alone"
    assert trials.next_group({"a", "b"}) == ["b"]
    trials.proved("b")
    assert trials.next_group({"a", "b"}) == ["a"]
    assert trials.died(["a"]) == "a"
    assert trials.next_group({"b"}) == []
