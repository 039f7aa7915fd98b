"""SplitFuse: full passes, silent waiting, whole capacity for prompts, and the way out of a full pool."""

from __future__ import annotations

import pytest

from hopon.core.plan import StepPlan
from hopon.core.policy.systems.splitfuse import SplitFuse
from tests.core.harness import Harness, request
from tests.core.systems.runs import Table, harness, run_traces

PLAIN = {"enable_prefix_caching": False, "max_num_batched_tokens": 8}


def test_prompts_fill_the_pass_behind_the_decodes() -> None:
    """Worked by hand: passes of 8; a (3 tokens, 2 to generate), b (9, 1), c (6, 1)."""
    a, b, c = request("a", 3, max_tokens=2), request("b", 9, max_tokens=1), request("c", 6, max_tokens=1)
    h = harness(SplitFuse(), 100, **PLAIN)
    h.add(a, b, c)
    assert Table(h, a, b, c).finish() == [
        [("a", 0, 3), ("b", 0, 5)],
        [("a", 3, 1), ("b", 5, 4), ("c", 0, 3)],
        [("c", 3, 3)],
    ]


def test_who_finds_no_block_waits_until_nobody_can_go_on() -> None:
    """Worked by hand: 9 slots, a and b of 4 tokens. b waits in step 2; in step 3 both would, and b goes."""
    a, b = request("a", 4, max_tokens=3), request("b", 4, max_tokens=3)
    h = harness(SplitFuse(), 9, **PLAIN)
    h.add(a, b)
    assert Table(h, a, b).finish() == [
        [("a", 0, 4), ("b", 0, 4)],
        [("a", 4, 1)],
        [("a", 5, 1)],  # out of b's memory; b's five tokens do not fit into the three slots left
        [("b", 0, 5)],
        [("b", 5, 1)],
    ]
    assert h.scheduler.counters.num_preemptions == 1


def test_a_victim_goes_to_the_back() -> None:
    """In the same pool c, which came after b, is served before it."""
    a, b, c = request("a", 4, max_tokens=3), request("b", 4, max_tokens=3), request("c", 3, max_tokens=1)
    h = harness(SplitFuse(), 9, **PLAIN)
    h.add(a, b)
    table = Table(h, a, b, c)
    steps = table.run(2)
    h.add(c)
    steps = steps[1:] + table.finish()
    assert steps == [
        [("a", 4, 1)],
        [("a", 5, 1), ("c", 0, 3)],
        [("b", 0, 5)],
        [("b", 5, 1)],
    ]


def test_a_prompt_needs_room_for_all_that_is_left_of_it() -> None:
    """10 slots, 4 taken: with 7 to come nobody starts and those behind wait, too; with 6 it starts."""
    for length, started in ((7, [("a", 0, 4)]), (6, [("a", 0, 4), ("b", 0, 4)])):
        a, b, c = request("a", 4), request("b", length), request("c", 1)
        h = harness(SplitFuse(), 10, **PLAIN)
        h.add(a, b, c)
        assert Table(h, a, b, c).step() == started


def test_a_cut_prompt_waits_for_room_like_any_other() -> None:
    """Worked by hand: 10 slots, blocks of one token. b (6) is cut after 4; a's next token takes the last free slot but
    one, the rest of b no longer fits and nobody behind it starts; when a has ended it goes on."""
    a, b, c = request("a", 4, max_tokens=2), request("b", 6, max_tokens=1), request("c", 1, max_tokens=1)
    h = harness(SplitFuse(), 10, **PLAIN)
    h.add(a, b, c)
    assert Table(h, a, b, c).finish() == [
        [("a", 0, 4), ("b", 0, 4)],
        [("a", 4, 1)],
        [("b", 4, 2), ("c", 0, 1)],
    ]


def test_sequences_of_a_pass_are_counted() -> None:
    """At most two of them: decodes first, then prompts."""
    a, b, c = request("a", 1, max_tokens=3), request("b", 2, max_tokens=3), request("c", 3, max_tokens=3)
    h = harness(SplitFuse(max_ragged_sequence_count=2), 100, **PLAIN)
    h.add(a, b, c)
    assert Table(h, a, b, c).run(2) == [[("a", 0, 1), ("b", 0, 2)], [("a", 1, 1), ("b", 2, 1)]]


def test_passes_are_full() -> None:
    """On random traces with room for all: a pass has all of its tokens, or nobody waits and every prompt in it ends."""

    def watch(h: Harness, plan: StepPlan) -> None:
        if plan.num_tokens < h.scheduler.config.max_num_batched_tokens:
            assert not h.scheduler.num_waiting
            assert all(chunk.sample for chunk in plan.chunks)

    changes = {"num_blocks": 3000, "max_num_seqs": 30, "max_num_batched_tokens": 32}
    run_traces(100, lambda seed: SplitFuse(), changes=changes, depths=(1,), watch=watch)


def test_random_traces() -> None:
    """Everybody ends once, however full the pool."""
    run = run_traces(200, lambda seed: SplitFuse())
    assert sum(h.scheduler.counters.num_preemptions for h in run) > 20


def test_knobs_are_checked() -> None:
    """An impossible value is named."""
    with pytest.raises(ValueError, match="max_ragged_sequence_count must be at least 1, got 0"):
        SplitFuse(max_ragged_sequence_count=0)
