"""Triton's dynamic batcher: what goes when. Steps take a second; delays are in seconds here."""

from __future__ import annotations

import pytest

from hopon.core.policy.systems.dynamic import Dynamic
from hopon.core.types import FinishReason, Request
from tests.core.harness import Harness, config, request

SECOND = 1_000_000


def make(preset: Dynamic, num_blocks: int = 100, **changes: object) -> Harness:
    settings = config(num_blocks, **({"block_size": 1, "enable_prefix_caching": False} | changes))
    return Harness.make(settings, policy=preset.policy(settings))


def add(h: Harness, *asked: Request) -> None:
    """They arrive now."""
    for one in asked:
        fields = {"arrival": h.now, "priority": one.priority}
        h.add(request(one.request_id, one.prompt, one.params.max_tokens or 1, **fields))


def batches(h: Harness) -> list[tuple[float, str]]:
    """(when it started, members in order) of each batch; ids are single letters, prompts start with theirs."""
    return [
        (float(i + 1), "".join(chr(opened.prompt[0]) for opened in plan.opened))
        for i, plan in enumerate(h.plans)
        if plan.opened
    ]


def ask(name: str, max_tokens: int = 1, priority: int = 0) -> Request:
    return request(name, (ord(name), 50), max_tokens, priority=priority)


def test_without_a_delay_whatever_is_there_goes() -> None:
    """Two of four go at once; those who come meanwhile go together when both have left."""
    h = make(Dynamic(max_batch_size=4))
    add(h, ask("a", 1), ask("b", 3))
    h.step()
    add(h, ask("c"))
    h.step()
    add(h, ask("d"))
    h.run()
    assert batches(h) == [(1.0, "ab"), (4.0, "cd")]


def test_a_batch_waits_for_the_delay_of_its_oldest() -> None:
    """Two requests of a batch of three wait until five seconds after the first arrived."""
    h = make(Dynamic(max_batch_size=3, max_queue_delay_microseconds=5 * SECOND))
    add(h, ask("a"))
    assert h.step().wake_at == 5.0
    add(h, ask("b"))
    assert h.step().wake_at == 5.0
    h.run()
    assert batches(h) == [(5.0, "ab")]


def test_a_full_batch_goes_at_once() -> None:
    """Without preferred sizes the largest is the preferred one."""
    h = make(Dynamic(max_batch_size=3, max_queue_delay_microseconds=50 * SECOND))
    add(h, ask("a"), ask("b"), ask("c"), ask("d"))
    h.step()
    assert batches(h) == [(1.0, "abc")]
    assert h.step().wake_at == 50.0


def test_the_largest_preferred_size_reached_goes_at_once() -> None:
    """Of seven, preferred sizes 2 and 4: four, then two; the last one waits for the delay."""
    h = make(Dynamic(max_batch_size=6, preferred_batch_size=(2, 4), max_queue_delay_microseconds=9 * SECOND))
    add(h, *map(ask, "abcdefg"))
    h.run()
    assert batches(h) == [(1.0, "abcd"), (2.0, "ef"), (9.0, "g")]


def test_past_the_delay_all_go() -> None:
    """A batch that has waited too long behind another is not cut to a preferred size."""
    h = make(Dynamic(max_batch_size=6, preferred_batch_size=(2, 4), max_queue_delay_microseconds=3 * SECOND))
    add(h, ask("a", 5), ask("b", 5))
    h.step()
    add(h, *map(ask, "cde"))
    h.run()
    assert batches(h) == [(1.0, "ab"), (6.0, "cde")]


def test_without_a_delay_a_preferred_size_is_preferred() -> None:
    """Six waiting, preferred size 4, no delay: four, then the rest."""
    h = make(Dynamic(max_batch_size=6, preferred_batch_size=(4,)))
    add(h, *map(ask, "abcdef"))
    h.run()
    assert batches(h) == [(1.0, "abcd"), (2.0, "ef")]


def test_a_batch_that_cannot_grow_does_not_wait() -> None:
    """Ten slots hold three reservations of 3; the fourth request will not make the batch larger by waiting."""
    h = make(Dynamic(max_batch_size=5, max_queue_delay_microseconds=50 * SECOND), 10)
    add(h, *map(ask, "abcd"))
    h.step()
    assert batches(h) == [(1.0, "abc")]


def test_urgent_levels_go_first() -> None:
    """Level 1 before level 2; who names no level belongs to the default."""
    h = make(Dynamic(max_batch_size=2, priority_levels=2, default_priority_level=2))
    add(h, ask("a"), ask("b", priority=2), ask("c", priority=1), ask("d", priority=7))
    h.run()
    assert batches(h) == [(1.0, "ca"), (2.0, "bd")]


def test_a_timeout_rejects() -> None:
    """Behind a batch of five passes a request with a timeout of three seconds is refused when the model is free."""
    h = make(Dynamic(default_timeout_microseconds=(3 * SECOND,)))
    add(h, ask("a", 5))
    h.step()
    add(h, ask("b"))
    h.until(lambda: h.now == 4.0)
    add(h, ask("c"))
    h.run()
    assert batches(h) == [(1.0, "a"), (6.0, "c")]
    assert h.reason("b") is FinishReason.REFUSED
    assert "5 s" in h.finished["b"].message


def test_a_timeout_delays() -> None:
    """The same request goes behind everybody else of its level instead."""
    h = make(Dynamic(max_batch_size=1, default_timeout_microseconds=(3 * SECOND,), timeout_action="delay"))
    add(h, ask("a", 5))
    h.step()
    add(h, ask("b"))
    h.until(lambda: h.now == 4.0)
    add(h, ask("c"))
    h.run()
    assert batches(h) == [(1.0, "a"), (6.0, "c"), (7.0, "b")]


def test_the_nearest_timeout_wakes_the_batcher() -> None:
    """Nobody sleeps through a timeout while a batch is waiting to grow."""
    knobs = Dynamic(max_queue_delay_microseconds=50 * SECOND, default_timeout_microseconds=(4 * SECOND,))
    h = make(knobs)
    add(h, ask("a"))
    assert h.step().wake_at == 4.0
    h.now = 3.0
    h.step()
    assert h.reason("a") is FinishReason.REFUSED
    assert not h.scheduler.has_work


def test_a_full_queue_refuses_the_latest() -> None:
    """Level 1 takes two waiting requests, level 2 any number; the third of level 1 is refused with the number."""
    knobs = Dynamic(max_batch_size=1, priority_levels=2, default_priority_level=2, max_queue_size=(2, 0))
    h = make(knobs)
    add(h, ask("a", 3))
    h.step()
    add(h, *(ask(name, priority=1) for name in "bcd"), ask("e"), ask("f"), ask("g"))
    h.run()
    assert batches(h) == [(1.0, "a"), (4.0, "b"), (5.0, "c"), (6.0, "e"), (7.0, "f"), (8.0, "g")]
    assert h.reason("d") is FinishReason.REFUSED
    assert h.finished["d"].message.startswith("2 requests")


def test_members_that_are_about_to_start_do_not_fill_the_queue() -> None:
    """A batch whose prompts take three passes has left the queue; two more may wait."""
    h = make(Dynamic(max_batch_size=3, max_queue_size=(3,)), max_num_batched_tokens=3, max_num_seqs=3)
    add(h, *map(ask, "abc"))
    h.step()
    add(h, *map(ask, "def"))
    h.run()
    assert {h.reason(name) for name in "abcdef"} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"preferred_batch_size": (9,), "max_batch_size": 8}, r"preferred_batch_size .*8.*got 9"),
        ({"max_batch_size": 9}, r"max_batch_size .*max_num_seqs 8.*got 9"),
        ({"max_queue_delay_microseconds": -1}, r"max_queue_delay_microseconds .*-1"),
        ({"priority_levels": 2}, r"default_priority_level .*priority_levels 2.*got 0"),
        ({"timeout_action": "shrug"}, r"timeout_action .*'shrug'"),
        ({"max_queue_size": (1, 2, 3)}, r"max_queue_size .*1 levels, got 3"),
        ({"default_timeout_microseconds": (-5,)}, r"default_timeout_microseconds .*-5"),
    ],
)
def test_impossible_values_name_the_numbers(knobs: dict[str, object], message: str) -> None:
    """Each error names the knob, the value and the limit."""
    with pytest.raises(ValueError, match=message):
        Dynamic(**knobs).policy(config())  # type: ignore[arg-type]
