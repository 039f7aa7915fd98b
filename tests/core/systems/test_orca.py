"""Orca, iteration by iteration."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from hopon.core.plan import StepPlan
from hopon.core.policy.admission import Offer, ReserveMaxTokens, Verdict
from hopon.core.policy.preset import Policy
from hopon.core.policy.systems.orca import Orca
from hopon.core.sequence import Sequence
from hopon.core.step import Step
from hopon.core.types import FinishReason
from tests.core.harness import Harness, config, request
from tests.core.systems.drive import Driver, random_system, random_trace, schedule, trace_fields


def make(preset: Orca, num_blocks: int, **changes: object) -> Harness:
    settings = config(num_blocks, **({"block_size": 1, "enable_prefix_caching": False} | changes))
    return Harness.make(settings, policy=preset.policy(settings))


def test_requests_join_with_their_memory_reserved() -> None:
    """20 slots hold 7 and 8; c's 7 ends the walk although d's 2 would fit; both join when a has left."""
    h = make(Orca(max_bs=3), 20)
    asked = request("a", 3, 4), request("b", 2, 6), request("c", 4, 3), request("d", 1, 1)
    h.add(*asked)
    h.run()
    assert schedule(h, *asked) == [
        [("a", 0, 3), ("b", 0, 2)],
        [("a", 3, 1), ("b", 2, 1)],
        [("a", 4, 1), ("b", 3, 1)],
        [("a", 5, 1), ("b", 4, 1)],
        [("b", 5, 1), ("c", 0, 4), ("d", 0, 1)],
        [("b", 6, 1), ("c", 4, 1)],
        [("c", 5, 1)],
    ]


def test_the_walk_stops_at_max_bs() -> None:
    """Two requests per iteration, however much memory there is."""
    h = make(Orca(max_bs=2), 100)
    asked = request("a", 3, 1), request("b", 2, 2), request("c", 1, 1)
    h.add(*asked)
    h.run()
    assert schedule(h, *asked) == [[("a", 0, 3), ("b", 0, 2)], [("b", 2, 1), ("c", 0, 1)]]


def test_the_ports_reserve_the_models_length() -> None:
    """20 slots and a model of 10 tokens: two at a time, whatever they ask for."""
    h = make(Orca(reserve="max_model_len"), 20, max_model_len=10)
    asked = request("a", 3, 2), request("b", 2, 3), request("c", 1, 1)
    h.add(*asked)
    h.run()
    assert schedule(h, *asked) == [
        [("a", 0, 3), ("b", 0, 2)],
        [("a", 3, 1), ("b", 2, 1)],
        [("b", 3, 1), ("c", 0, 1)],
    ]


def test_a_whole_prompt_waits_for_room_in_the_pass() -> None:
    """A budget of 8: b's 8 tokens do not fit beside a's decode, and c does not overtake it."""
    h = make(Orca(), 100, max_num_batched_tokens=8)
    asked = request("a", 3, 2), request("b", 8, 1), request("c", 1, 1)
    h.add(*asked)
    h.run()
    assert schedule(h, *asked) == [[("a", 0, 3)], [("a", 3, 1)], [("b", 0, 8)], [("c", 0, 1)]]


def test_a_prompt_beyond_any_pass_is_refused() -> None:
    """With both numbers; who comes behind it is served."""
    h = make(Orca(), 100, max_num_batched_tokens=8)
    h.add(request("a", 9, 1), request("b", 8, 1))
    h.run()
    assert h.reason("a") is FinishReason.REFUSED
    assert "9 tokens" in h.finished["a"].message
    assert "max_num_batched_tokens is 8" in h.finished["a"].message
    assert h.reason("b") is FinishReason.LENGTH


def test_impossible_values_name_the_numbers() -> None:
    """A pool smaller than one reservation; knobs out of range."""
    with pytest.raises(ValueError, match=r"1024 tokens .*num_blocks 63 of 16 hold 1008"):
        Orca(reserve="max_model_len").policy(config(63))
    with pytest.raises(ValueError, match=r"max_bs .*0"):
        Orca(max_bs=0)
    bad: Any = "everything"
    with pytest.raises(ValueError, match=r"reserve .*'everything'"):
        Orca(reserve=bad)


@dataclass
class Counting(Driver):
    """Counts iterations per request and compares them."""

    iterations: Counter[int] = field(default_factory=Counter)

    def step(self) -> StepPlan:
        plan = super().step()
        self.iterations.update(int(self.names[chunk.row]) for chunk in plan.chunks)
        alive = [int(name) for name in self.scheduler._sequences]
        for earlier, later in pairwise(alive):
            assert self.iterations[earlier] >= self.iterations[later], f"{later} has run more often than {earlier}"
        return plan


def play(seed: int, mutate: Callable[[Policy], Policy] = lambda policy: policy) -> Counting:
    rng = random.Random(seed)
    settings, policy = random_system(rng, "orca", trace_fields)
    driver = Counting.make(settings, policy=mutate(policy))
    assert isinstance(driver, Counting)
    driver.scripted = True
    trace = random_trace(rng, settings)
    for i, (step, one) in enumerate(trace.arrivals):
        trace.arrivals[i] = (step, replace(one, prompt=(i, *one.prompt[1:]), stop_token_ids=()))
    driver.play(trace)
    return driver


def test_an_earlier_request_has_run_at_least_as_often(effort: Callable[[int, int], int]) -> None:
    """While unfinished, an earlier request has run at least as many iterations as any later one; nobody is preempted;
    prompts are whole. Random traces with one batch in flight."""
    crowded = 0
    for seed in range(effort(100, 1000)):
        driver = play(seed)
        assert driver.scheduler.counters.num_preemptions == 0
        for plan in driver.plans:
            assert all(chunk.sample for chunk in plan.chunks), "a prompt was split"
        crowded += max((len(plan.chunks) for plan in driver.plans), default=0) > 2
    assert crowded > 5


class Skipping(ReserveMaxTokens):
    """A mutant: passes over who does not fit."""

    def decide(self, sequence: Sequence, offer: Offer, step: Step) -> Verdict:
        return Verdict.START if offer.num_needed <= offer.num_free else Verdict.SKIP


def test_the_invariant_can_fail() -> None:
    """A walk that goes on behind the first that does not fit lets a later request run more often."""

    def mutant(seed: int) -> None:
        play(seed, lambda policy: replace(policy, admission=Skipping()))

    with pytest.raises(AssertionError, match="has run more often"):
        list(map(mutant, range(100)))
