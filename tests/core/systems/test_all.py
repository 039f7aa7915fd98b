"""What holds for every published system: progress, conservation, one end each, the same outputs, no look ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

import pytest

from hopon.core.policy.composition import Action, Admit, Composition, Continue, DecodeFirst, Pad, Refuse, WaitUntil
from hopon.core.policy.presets import PRESETS
from hopon.core.step import Step
from tests.core.systems.drive import NAMES, Driver, check_identity, check_no_peeking, run_trace


def test_every_name_of_the_table_resolves() -> None:
    """No system of the table is missing."""
    assert list(PRESETS) == NAMES


RESERVING = "static static-impatient hf-pipeline dynamic orca tgi trt-no-evict trt-static llama-cpp".split()
PREEMPTING = "hopon vllm-v0 vllm sarathi splitfuse trt-max-utilization lmdeploy turbomind openvino nano".split()
"""Where every handful of crowds shows it; the others preempt, too, but seldom (their own tests make them)."""


@pytest.mark.parametrize("name", NAMES)
def test_random_traces(name: str, effort: Callable[[int, int], int]) -> None:
    """Every step makes progress or says when to wake, budgets hold, memory and seats are conserved, all end once."""
    for seed in range(effort(30, 1500)):
        try:
            run_trace(name, seed)
        except AssertionError as error:
            raise AssertionError(f"{name}, trace {seed}: {error}") from error


@pytest.mark.parametrize("name", NAMES)
def test_alone_or_in_any_crowd(name: str, effort: Callable[[int, int], int]) -> None:
    """On a device made of integers, a policy changes when a request is served, never what it gets."""
    count = effort(20, 400)
    served, stats = zip(*(check_identity(name, seed) for seed in range(count)), strict=True)
    assert sum(served) > 6 * count, "most requests must be served to their end"
    preemptions = sum(one.num_preemptions for one in stats)
    assert not (name in RESERVING and preemptions), "who reserves never preempts"
    assert preemptions or name not in PREEMPTING, "schedules must be tight enough to preempt"


@pytest.mark.parametrize("name", NAMES)
def test_no_peeking(name: str, effort: Callable[[int, int], int]) -> None:
    """When a request will emit its end token never changes an earlier plan."""
    count = effort(15, 400)
    assert sum(check_no_peeking(name, seed) for seed in range(count)) > count // 3


class Oracle(DecodeFirst):
    """A mutant that knows whether somebody will emit an end token, and lets nobody join then."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def compose(self, step: Step) -> Iterator[Action]:
        if self._driver.script is None:
            yield from super().compose(step)
        else:
            yield Continue()
            if not step.chunks:
                yield Admit()


def test_look_ahead_is_caught() -> None:
    """A policy that is told the end in advance does not pass."""

    def check(seed: int) -> None:
        check_no_peeking("hopon", seed, Oracle)

    with pytest.raises(AssertionError, match="depends on an end yet to come"):
        list(map(check, range(30)))


@dataclass
class Mutant:
    """Does one wrong thing, then what DecodeFirst does unless that was all."""

    action: Callable[[Step], Action | None]
    only: bool = False

    def compose(self, step: Step) -> Iterator[Action]:
        action = self.action(step)
        if action is not None:
            yield action
        if action is None or not self.only:
            yield from DecodeFirst().compose(step)


def refuse_first(step: Step) -> Action | None:
    return next((Refuse(s, "no") for s in step.waiting), None)


MUTANTS: dict[str, tuple[Composition, str]] = {
    "sleeps for ever": (Mutant(lambda step: WaitUntil(inf), only=True), "waits for ever"),
    "wakes in the past": (Mutant(lambda step: WaitUntil(step.now), only=True), "not in the future"),
    "does nothing": (Mutant(lambda step: Continue(max_seqs=0), only=True), "none can ever be planned"),
    "pads for ever": (Mutant(lambda step: Pad(1, more=True)), "does not end"),
    "refuses without numbers": (Mutant(refuse_first), "without numbers"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_bad_policies_are_caught(mutant: str) -> None:
    """Policies that stall, wait for what never comes, never end or refuse without the numbers do not pass."""
    composition, message = MUTANTS[mutant]

    def run(seed: int) -> None:
        run_trace("hopon", seed, lambda driver: composition)

    with pytest.raises(AssertionError, match=message):
        list(map(run, range(5)))
