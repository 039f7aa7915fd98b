"""OpenVINO: decodes before prompts, tails that are given back, and never half a prompt."""

from __future__ import annotations

import pytest

from hopon.core.policy.systems.openvino import OpenVino
from tests.core.harness import request
from tests.core.systems.runs import Table, harness, run_traces

PLAIN = {"enable_prefix_caching": False, "block_size": 4}


def test_the_lowest_gives_back_the_tail_that_is_needed() -> None:
    """Worked by hand: four blocks of 4; a (3 tokens, 10 to generate), b (2, 8). In step 7 a needs a third block: b
    gives back its second one and keeps four of its seven tokens. When a has ended, b goes on from there."""
    a, b = request("a", 3, max_tokens=10), request("b", 2, max_tokens=8)
    h = harness(OpenVino(), 4, **PLAIN)
    h.add(a, b)
    assert Table(h, a, b).finish() == [
        [("a", 0, 3), ("b", 0, 2)],
        [("a", 3, 1), ("b", 2, 1)],
        [("a", 4, 1), ("b", 3, 1)],
        [("a", 5, 1), ("b", 4, 1)],
        [("a", 6, 1), ("b", 5, 1)],
        [("a", 7, 1), ("b", 6, 1)],
        [("a", 8, 1)],
        [("a", 9, 1)],
        [("a", 10, 1)],
        [("a", 11, 1)],
        [("b", 4, 4)],
        [("b", 8, 1)],
    ]
    assert h.scheduler.counters.num_preemptions == 1
    assert h.scheduler.counters.num_recomputed_tokens == 3


@pytest.mark.parametrize(("never", "resumed"), [(True, [("b", 0, 9)]), (False, [("b", 4, 5)])])
def test_never_half_a_prompt(never: bool, resumed: list[tuple[str, int, int]]) -> None:
    """Worked by hand: b's prompt of 6 reaches into its second block: it gives everything back, or only that block."""
    a, b = request("a", 3, max_tokens=10), request("b", 6, max_tokens=8)
    h = harness(OpenVino(never_half_a_prompt=never), 4, **PLAIN)
    h.add(a, b)
    assert Table(h, a, b).run(11) == [
        [("a", 0, 3), ("b", 0, 6)],
        [("a", 3, 1), ("b", 6, 1)],
        [("a", 4, 1), ("b", 7, 1)],
        [("a", 5, 1)],  # b needs a third block, and nobody is below it
        [("a", 6, 1)],
        [("a", 7, 1)],
        [("a", 8, 1)],  # out of b's memory
        [("a", 9, 1)],
        [("a", 10, 1)],
        [("a", 11, 1)],
        resumed,
    ]


def test_prompts_take_what_is_free_and_nobody_is_preempted_for_them() -> None:
    """Worked by hand: three blocks. b (10 tokens) takes eight slots and waits; in step 3 a needs a block, and b, half a
    prompt, gives everything back."""
    a, b = request("a", 3, max_tokens=3), request("b", 10, max_tokens=1)
    h = harness(OpenVino(), 3, **PLAIN)
    h.add(a, b)
    assert Table(h, a, b).finish() == [
        [("a", 0, 3), ("b", 0, 8)],
        [("a", 3, 1)],
        [("a", 4, 1)],
        [("b", 0, 10)],
    ]


def test_a_preempted_one_goes_on_before_prompts() -> None:
    """Worked by hand: in the steps before a ends b is the first in line for a free block, c only when b has run."""
    a, b = request("a", 3, max_tokens=10), request("b", 2, max_tokens=8)
    c = request("c", 9, max_tokens=1)
    h = harness(OpenVino(), 4, max_num_batched_tokens=12, **PLAIN)
    h.add(a, b)
    table = Table(h, a, b, c)
    table.run(8)
    h.add(c)
    assert table.finish() == [
        [("a", 10, 1)],
        [("a", 11, 1)],
        [("b", 4, 4), ("c", 0, 8)],  # three blocks are free: one for b, two for c
        [("b", 8, 1)],  # into c's memory: half a prompt goes back whole
        [("c", 0, 9)],
    ]


def test_a_pool_full_of_half_prompts_is_no_dead_end() -> None:
    """Worked by hand: three blocks, at most 4 tokens of one prompt in a pass. a (12) holds two blocks and b (9) one;
    both need more, and nobody can go on: b gives everything back, and a goes on in the same pass."""
    a, b = request("a", 12, max_tokens=1), request("b", 9, max_tokens=1)
    h = harness(OpenVino(), 3, long_prefill_token_threshold=4, **PLAIN)
    h.add(a, b)
    assert Table(h, a, b).finish() == [
        [("a", 0, 4), ("b", 0, 4)],
        [("a", 4, 4)],
        [("a", 8, 4)],
        [("b", 0, 4)],
        [("b", 4, 4)],
        [("b", 8, 1)],
    ]


@pytest.mark.parametrize("never", [True, False])
def test_random_traces(never: bool) -> None:
    """Everybody ends once, and some are preempted."""
    run = run_traces(200, lambda seed: OpenVino(never_half_a_prompt=never))
    assert sum(h.scheduler.counters.num_preemptions for h in run) > 20
