"""TensorRT-LLM: three capacity schedulers, two ways of cutting prompts, and prefixes that are on their way."""

from __future__ import annotations

import pytest

from hopon.core.plan import StepPlan
from hopon.core.policy.systems.tensorrt import TrtMaxUtilization, TrtNoEvict, TrtStatic
from hopon.core.types import FinishReason
from tests.core.harness import Harness, request
from tests.core.systems.runs import Table, harness, run_traces

PLAIN = {"enable_prefix_caching": False}


def test_first_come_first_served_chunks() -> None:
    """Worked by hand: passes of 10 in units of 4; a (3 tokens, 3 to generate), b (13, 2), c (6, 1)."""
    a, b, c = request("a", 3, max_tokens=3), request("b", 13, max_tokens=2), request("c", 6, max_tokens=1)
    h = harness(TrtNoEvict(), 100, block_size=4, max_num_batched_tokens=10)
    h.add(a, b, c)
    assert Table(h, a, b, c).finish() == [
        [("a", 0, 3), ("b", 0, 4)],  # 7 are left for b, rounded down to a unit; 3 for c, rounded down to nothing
        [("a", 3, 1), ("b", 4, 9)],
        [("a", 4, 1), ("b", 13, 1), ("c", 0, 6)],
    ]


def test_equal_progress_chunks() -> None:
    """Worked by hand: passes of 12, the same requests: a unit for everybody before anybody gets a second."""
    a, b, c = request("a", 3, max_tokens=3), request("b", 13, max_tokens=2), request("c", 6, max_tokens=1)
    h = harness(TrtNoEvict(chunking="equal-progress"), 100, block_size=4, max_num_batched_tokens=12)
    h.add(a, b, c)
    assert Table(h, a, b, c).finish() == [
        [("a", 0, 3), ("b", 0, 4), ("c", 0, 4)],  # 1 is left, and no unit fits
        [("a", 3, 1), ("b", 4, 9), ("c", 4, 2)],  # b 4, c 2, b 4, b 1
        [("a", 4, 1), ("b", 13, 1)],
    ]


def test_equal_progress_in_small_units() -> None:
    """Worked by hand: units of 2 in 12: x and y get 2, 4, then x 6 and y its fifth; the last token is no unit."""
    x, y = request("x", 20), request("y", 5)
    h = harness(TrtNoEvict(chunking="equal-progress", chunk_unit=2), 100, max_num_batched_tokens=12)
    h.add(x, y)
    assert Table(h, x, y).step() == [("x", 0, 6), ("y", 0, 5)]


def test_prompts_that_all_fit_are_whole() -> None:
    """Under either policy."""
    for preset in (TrtNoEvict(), TrtNoEvict(chunking="equal-progress")):
        a, b = request("a", 7), request("b", 5)
        h = harness(preset, 100, block_size=4, max_num_batched_tokens=12)
        h.add(a, b)
        assert Table(h, a, b).step() == [("a", 0, 7), ("b", 0, 5)]


def test_no_evict_counts_to_completion_and_keeps_the_order() -> None:
    """20 slots in blocks of 4: a takes 12; b would need 13, and c, which would fit, stays behind it."""
    a, b, c = request("a", 3, max_tokens=9), request("b", 5, max_tokens=8), request("c", 1, max_tokens=1)
    h = harness(TrtNoEvict(), 5, block_size=4)
    h.add(a, b, c)
    assert Table(h, a, b, c).run(2) == [[("a", 0, 3)], [("a", 3, 1)]]


def test_max_utilization_pauses_the_last_that_started() -> None:
    """Worked by hand: 10 slots, a and b of 4 tokens. In step 3 b is paused; c, which would fit, does not start then,
    and later stands behind b."""
    a, b, c = request("a", 4, max_tokens=5), request("b", 4, max_tokens=5), request("c", 1, max_tokens=1)
    h = harness(TrtMaxUtilization(), 10, **PLAIN)
    h.add(a, b)
    table = Table(h, a, b, c)
    steps = table.run(2)
    h.add(c)
    assert steps + table.finish() == [
        [("a", 0, 4), ("b", 0, 4)],
        [("a", 4, 1), ("b", 4, 1)],
        [("a", 5, 1)],
        [("a", 6, 1)],
        [("a", 7, 1)],
        [("b", 0, 6), ("c", 0, 1)],
        [("b", 6, 1)],
        [("b", 7, 1)],
    ]


def test_static_batches() -> None:
    """Worked by hand: c comes while a and b run and waits for both; everybody hears of a batch when it ends."""
    a, b, c = request("a", 2, max_tokens=2), request("b", 2, max_tokens=3), request("c", 2, max_tokens=1)
    h = harness(TrtStatic(), 100)
    h.add(a, b)
    table = Table(h, a, b, c)
    steps = table.run(1)
    h.add(c)
    steps += table.run(1)
    assert not h.finished, "a has ended, but its batch has not"
    steps += table.run(1)
    assert set(h.finished) == {"a", "b"}
    assert steps + table.finish() == [
        [("a", 0, 2), ("b", 0, 2)],
        [("a", 2, 1), ("b", 2, 1)],
        [("b", 3, 1)],
        [("c", 0, 2)],
    ]


@pytest.mark.parametrize("preset", [TrtNoEvict(), TrtMaxUtilization(), TrtNoEvict(chunking="equal-progress")])
def test_a_prefix_that_is_being_computed_is_waited_for(preset: TrtNoEvict) -> None:
    """b shares two blocks with a: it is passed over, c is not, and in the next step b finds them cached."""
    shared = tuple(range(100, 108))
    a, b, c = request("a", (*shared, 1), max_tokens=3), request("b", (*shared, 2), max_tokens=3), request("c", 3)
    h = harness(preset, 50, block_size=4)
    h.add(a, b, c)
    assert Table(h, a, b, c).run(2) == [
        [("a", 0, 9), ("c", 0, 3)],
        [("a", 9, 1), ("c", 3, 1), ("b", 8, 1)],
    ]


def test_without_block_reuse_nobody_is_passed_over() -> None:
    """The same requests start together."""
    shared = tuple(range(100, 108))
    a, b = request("a", (*shared, 1)), request("b", (*shared, 2))
    h = harness(TrtNoEvict(), 50, block_size=4, **PLAIN)
    h.add(a, b)
    assert Table(h, a, b).step() == [("a", 0, 9), ("b", 0, 9)]


@pytest.mark.parametrize("preset", [TrtNoEvict(), TrtNoEvict(chunking="equal-progress"), TrtStatic()])
def test_a_started_request_is_never_paused(preset: TrtNoEvict) -> None:
    """On random traces: nobody is preempted, and everybody who generates gets a token in every pass."""

    def watch(h: Harness, plan: StepPlan) -> None:
        generating = {chunk.row for before in h.plans[-2:-1] for chunk in before.chunks if chunk.sample}
        assert generating - set(plan.closed) <= {chunk.row for chunk in plan.chunks}

    run = run_traces(150, lambda seed: preset, depths=(1,), watch=watch)
    assert sum(h.scheduler.counters.num_preemptions for h in run) == 0


def test_a_static_batch_starts_alone() -> None:
    """On random traces: whoever starts finds no row open."""

    def watch(h: Harness, plan: StepPlan) -> None:
        assert not plan.opened or set(h.rows) == {opened.row for opened in plan.opened}

    run_traces(100, lambda seed: TrtStatic(), depths=(1,), watch=watch)


@pytest.mark.parametrize("chunking", ["fcfs", "equal-progress"])
def test_max_utilization_random_traces(chunking: str) -> None:
    """Everybody ends once, and some are paused."""
    run = run_traces(150, lambda seed: TrtMaxUtilization(chunking=chunking))  # type: ignore[arg-type]
    assert sum(h.scheduler.counters.num_preemptions for h in run) > 20


def test_what_cannot_be_reserved_is_refused() -> None:
    """Prompt and max_tokens exceed the pool: refused with the numbers."""
    h = harness(TrtNoEvict(), 10)
    h.add(request("a", 5, max_tokens=6))
    h.run()
    assert h.reason("a") is FinishReason.REFUSED
    assert "reserves 11 tokens of memory" in h.finished["a"].message


def test_knobs_are_checked() -> None:
    """An impossible value is named."""
    with pytest.raises(ValueError, match="chunking must be 'fcfs' or 'equal-progress', got 'random'"):
        TrtNoEvict(chunking="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_unit 65 exceeds max_num_batched_tokens 64"):
        harness(TrtNoEvict(chunk_unit=65), 50)
    with pytest.raises(ValueError, match="delivery must be 'batch' or 'stream', got 'post'"):
        TrtStatic(delivery="post")  # type: ignore[arg-type]
