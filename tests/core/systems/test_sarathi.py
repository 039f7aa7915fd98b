"""Sarathi-Serve: hand-worked schedules, the chunk schedule, and that no decode ever waits."""

from __future__ import annotations

import pytest

from hopon.core.plan import StepPlan
from hopon.core.policy.systems.sarathi import Sarathi
from tests.core.harness import Harness, request
from tests.core.systems.runs import Table, harness, run_traces

PLAIN = {"enable_prefix_caching": False}


def test_decodes_then_pieces_then_newcomers() -> None:
    """Worked by hand: chunk size 6; a (3 tokens, 3 to generate), b (10, 2), c (4, 1)."""
    a, b, c = request("a", 3, max_tokens=3), request("b", 10, max_tokens=2), request("c", 4, max_tokens=1)
    h = harness(Sarathi(chunk_size=6), 100)
    h.add(a, b, c)
    assert Table(h, a, b, c).finish() == [
        [("a", 0, 3), ("b", 0, 3)],
        [("a", 3, 1), ("b", 3, 5)],
        [("a", 4, 1), ("b", 8, 2), ("c", 0, 3)],
        [("b", 10, 1), ("c", 3, 1)],
    ]


def test_the_whole_prompt_needs_room() -> None:
    """12 slots, 3 taken: a prompt of 10 does not start, although its first piece would fit; one of 9 does."""
    for length, started in ((10, [("a", 0, 3)]), (9, [("a", 0, 3), ("b", 0, 3)])):
        a, b = request("a", 3), request("b", length)
        h = harness(Sarathi(chunk_size=6, watermark=0.0), 12)
        h.add(a, b)
        assert Table(h, a, b).step() == started


def test_the_last_is_preempted_from_the_tail() -> None:
    """Worked by hand: 10 slots, a and b of 4 tokens, chunk size 8. In step 3 a takes b's memory."""
    a, b = request("a", 4, max_tokens=5), request("b", 4, max_tokens=5)
    h = harness(Sarathi(chunk_size=8, watermark=0.0), 10, **PLAIN)
    h.add(a, b)
    assert Table(h, a, b).finish() == [
        [("a", 0, 4), ("b", 0, 4)],
        [("a", 4, 1), ("b", 4, 1)],
        [("a", 5, 1)],
        [("a", 6, 1)],
        [("a", 7, 1)],
        [("b", 0, 6)],
        [("b", 6, 1)],
        [("b", 7, 1)],
    ]


def test_a_schedule_goes_from_large_to_small() -> None:
    """Sizes are evenly spaced, rounded to 32 tokens (or to the lowest size), and follow how far the prompt has come."""
    schedule = {"chunk_schedule_stages": 4, "chunk_schedule_max_tokens": 4096}
    assert Sarathi(low_chunk_size=64, high_chunk_size=256, **schedule).sizes == (256, 192, 128, 64)
    schedule["chunk_schedule_stages"] = 3
    assert Sarathi(low_chunk_size=100, high_chunk_size=200, **schedule).sizes == (192, 160, 96)
    small = Sarathi(chunk_schedule_stages=3, low_chunk_size=2, high_chunk_size=6, chunk_schedule_max_tokens=12)
    a = request("a", 14, max_tokens=1)
    h = harness(small, 100)
    h.add(a)
    assert Table(h, a).finish() == [[("a", 0, 6)], [("a", 6, 4)], [("a", 10, 2)], [("a", 12, 2)]]


def test_no_decode_waits() -> None:
    """On random traces every row that is decoding computes in each step, however long the prompts beside it, unless it
    is preempted or ends because it has the whole pool."""

    def watch(h: Harness, plan: StepPlan) -> None:
        decoding = {chunk.row for before in h.plans[-2:-1] for chunk in before.chunks if chunk.sample}
        gone = {*plan.closed, *h.scheduler._closing}
        assert decoding - gone <= {chunk.row for chunk in plan.chunks}
        assert plan.num_tokens <= max(7, len(h.rows))

    changes = {"max_num_batched_tokens": 32}
    run = run_traces(150, lambda seed: Sarathi(chunk_size=7), changes=changes, depths=(1,), aborts=False, watch=watch)
    assert sum(h.scheduler.counters.num_preemptions for h in run) > 20


def test_knobs_are_checked() -> None:
    """An impossible value is named."""
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        Sarathi(chunk_size=0)
    with pytest.raises(ValueError, match="1 <= low_chunk_size <= high_chunk_size, got 9 and 8"):
        Sarathi(chunk_schedule_stages=2, low_chunk_size=9, high_chunk_size=8, chunk_schedule_max_tokens=99)
