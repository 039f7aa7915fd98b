"""llama.cpp's server: slots, what they remember, and what happens without room."""

from __future__ import annotations

import pytest

from hopon.core.plan import StepPlan
from hopon.core.policy.systems.llama_cpp import LlamaCpp
from hopon.core.types import FinishReason
from tests.core.harness import Harness, request
from tests.core.systems.runs import Table, harness, run_traces


@pytest.mark.parametrize(
    ("cont_batching", "expected"),
    [
        (
            True,
            [
                [("a", 0, 3), ("b", 0, 5)],
                [("a", 3, 1), ("b", 5, 7)],
                [("a", 4, 1), ("c", 0, 2)],
            ],
        ),
        (
            False,
            [
                [("a", 0, 3), ("b", 0, 5)],
                [("a", 3, 1)],
                [("a", 4, 1)],
                [("c", 0, 2), ("b", 5, 6)],
                [("b", 11, 1)],
            ],
        ),
    ],
)
def test_steps(cont_batching: bool, expected: list[list[tuple[str, int, int]]]) -> None:
    """Worked by hand: two slots, batches of 8; c waits for a slot. Without continuous batching prompts wait for the
    end of generation."""
    a, b, c = request("a", 3, max_tokens=3), request("b", 12, max_tokens=1), request("c", 2, max_tokens=1)
    h = harness(LlamaCpp(cont_batching=cont_batching), 100, max_num_seqs=2, max_num_batched_tokens=8)
    h.add(a, b, c)
    assert Table(h, a, b, c).finish() == expected


def test_prompts_are_filled_in_slot_by_slot() -> None:
    """A newcomer in slot 0 goes before the rest of the prompt in slot 1."""
    asked = [request("a", 1, max_tokens=1), request("b", 20, max_tokens=1), request("c", 6, max_tokens=1)]
    h = harness(LlamaCpp(), 100, max_num_seqs=2, max_num_batched_tokens=8)
    h.add(*asked)
    assert Table(h, *asked).finish() == [
        [("a", 0, 1), ("b", 0, 7)],
        [("c", 0, 6), ("b", 7, 2)],
        [("b", 9, 8)],
        [("b", 17, 3)],
    ]


def test_a_slot_remembers_its_last_request_only() -> None:
    """q shares 15 of its 20 tokens with p and takes p's slot; then the slot begins with these 15 only, although the
    others of p are still in the pool."""
    p = request("p", 20, max_tokens=3)
    q = request("q", (*p.prompt[:15], 1, 2, 3, 4, 5), max_tokens=3)
    again = request("again", p.prompt[:18], max_tokens=1)
    h = harness(LlamaCpp(), 200, max_num_seqs=2)
    table = Table(h, p, q, again)
    expected = [("p", 0, 20), ("q", 15, 5), ("again", 15, 3)]
    for one, first in zip((p, q, again), expected, strict=True):
        h.add(one)
        assert table.finish()[0] == [first]


def test_a_slot_remembers_the_output_too() -> None:
    """A conversation that goes on finds its prompt and all of the answer that was computed."""
    p = request("p", 20, max_tokens=5)
    h = harness(LlamaCpp(), 200, max_num_seqs=2)
    h.add(p)
    h.run()
    q = request("q", (*p.prompt, *h.outputs["p"], 1, 2), max_tokens=1)
    table = Table(h, p, q)
    [table.read(plan) for plan in h.plans]
    h.add(q)
    assert table.finish() == [[("q", 24, 3)]]


def test_slots_are_private() -> None:
    """With p's slot busy, the same beginning is computed again in the other; and too little of it is not preferred
    over a slot that has rested longer."""
    p = request("p", 20, max_tokens=10)
    busy = request("busy", (*p.prompt, 1), max_tokens=1)
    h = harness(LlamaCpp(), 200, max_num_seqs=2)
    table = Table(h, p, busy)
    h.add(p)
    table.step()
    h.add(busy)
    assert table.step() == [("p", 20, 1), ("busy", 0, 21)]
    h.run()

    for share, start in ((9, 0), (10, 10)):  # of 20; the threshold is a half
        first = request("first", 20, max_tokens=1)
        second = request("second", (*first.prompt[:share], *range(20 - share)), max_tokens=1)
        h = harness(LlamaCpp(), 200, max_num_seqs=2)
        table = Table(h, first, second)
        h.add(first)
        table.finish()
        h.add(second)
        assert table.finish() == [[("second", start, 20 - start)]]


def test_the_slot_that_has_rested_longest() -> None:
    """Without a likeness the least recently used one: three requests in turn use slots 0, 1, 0, and the third of them
    overwrites the first, whose text is not found again."""
    asked = [request(name, 20, max_tokens=1) for name in "abc"]
    again = [request("a2", (*asked[0].prompt, 1), max_tokens=1), request("b2", (*asked[1].prompt, 1), max_tokens=1)]
    h = harness(LlamaCpp(), 400, max_num_seqs=2)
    table = Table(h, *asked, *again)
    for one in asked:
        h.add(one)
        table.finish()
    h.add(again[1])
    assert table.finish() == [[("b2", 20, 1)]]
    h.add(again[0])
    assert table.finish() == [[("a2", 0, 21)]]


def test_no_room_is_an_error() -> None:
    """Pool 10, two of 4 tokens: in step 3 neither a nor b can both grow; a fails, b takes the room and goes on until
    the pool is full."""
    a, b = request("a", 4, max_tokens=10), request("b", 4, max_tokens=10)
    h = harness(LlamaCpp(), 10, max_num_seqs=2)
    h.add(a, b)
    assert Table(h, a, b).finish() == [
        [("a", 0, 4), ("b", 0, 4)],
        [("a", 4, 1), ("b", 4, 1)],
        *([("b", start, 1)] for start in range(5, 10)),
    ]
    assert h.reason("a") is FinishReason.ERROR
    assert h.finished["a"].message == "no room in the context: 1 KV blocks of 1 tokens are missing, 0 of 10 are free"
    assert len(h.outputs["a"]) == 2
    assert h.reason("b") is FinishReason.LENGTH
    assert len(h.outputs["b"]) == 7


def test_a_prompt_without_room_is_an_error() -> None:
    """It fails when its tokens come up, whether they are its first or not; who generates is not touched."""
    a, b = request("a", 8, max_tokens=3), request("b", 5, max_tokens=1)
    for budget in (16, 3):
        h = harness(LlamaCpp(), 10, max_num_seqs=2, max_num_batched_tokens=budget, enable_prefix_caching=False)
        h.add(a)
        h.until(lambda: h.outputs.get("a"))  # noqa: B023  (called at once)
        h.add(b)
        h.run()
        assert h.reason("a") is FinishReason.LENGTH
        assert h.reason("b") is FinishReason.ERROR
        assert not h.outputs["b"]


def test_random_traces() -> None:
    """Nobody is ever preempted, and no request finds anything of a slot that is not its own."""

    def watch(h: Harness, plan: StepPlan) -> None:
        assert h.scheduler.counters.num_preemptions == 0

    for cont_batching in (True, False):
        run = run_traces(60, lambda seed, on=cont_batching: LlamaCpp(cont_batching=on), watch=watch)  # type: ignore[misc]
        reasons = {delta.finish for h in run for delta in h.finished.values()}
        assert reasons >= {FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR, FinishReason.REFUSED}


def test_knobs_are_checked() -> None:
    """An impossible value is named."""
    with pytest.raises(ValueError, match=r"slot_prompt_similarity must be in \[0, 1\], got -1"):
        LlamaCpp(slot_prompt_similarity=-1)
