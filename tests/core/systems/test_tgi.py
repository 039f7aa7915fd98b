"""TGI: rounds with and without chunking, reservations, and what validation refuses."""

from __future__ import annotations

import pytest

from hopon.core.policy.systems.tgi import Tgi
from hopon.core.types import FinishReason
from tests.core.harness import request
from tests.core.systems.runs import Table, harness, run_traces


def test_newcomers_are_served_when_there_are_enough_or_after_a_while() -> None:
    """Worked by hand, without chunking: four run, so that two must wait together (ratio 0.5), or three rounds pass."""
    four = [request(name, 2, max_tokens=20) for name in "abcd"]
    e, f, g = request("e", 3, max_tokens=1), request("f", 1, max_tokens=1), request("g", 1, max_tokens=1)
    h = harness(Tgi(chunking=False, waiting_served_ratio=0.5, max_waiting_tokens=3), 200)
    table = Table(h, *four, e, f, g)
    h.add(*four)
    assert table.step() == [(name, 0, 2) for name in "abcd"]
    h.add(e)
    assert table.run(3) == [
        [(name, 2, 1) for name in "abcd"],  # one is too few; the counter goes from 1 to 2
        [(name, 3, 1) for name in "abcd"],  # to 3
        [("e", 0, 3)],  # enough waiting: alone, while the others wait
    ]
    h.add(f, g)
    assert table.run(3) == [
        [(name, 4, 1) for name in "abcd"],  # the rest of e's round, although two are enough
        [("f", 0, 1), ("g", 0, 1)],
        [(name, 5, 1) for name in "abcd"],
    ]


def test_chunks_run_beside_decodes_and_fill_the_pass() -> None:
    """Worked by hand: prefill tokens 8. b is cut to 7 beside a's token; the rest of the round admits nobody."""
    a, b, c = request("a", 3, max_tokens=3), request("b", 10, max_tokens=1), request("c", 1, max_tokens=1)
    h = harness(Tgi(max_batch_prefill_tokens=8), 100)
    table = Table(h, a, b, c)
    h.add(a)
    steps = table.run(1)
    h.add(b)
    steps += table.run(1)
    h.add(c)
    assert steps + table.finish() == [
        [("a", 0, 3)],
        [("a", 3, 1), ("b", 0, 7)],
        [("a", 4, 1), ("b", 7, 3)],
        [("c", 0, 1)],
    ]


def test_whole_prompts_share_the_prefill_tokens() -> None:
    """Without chunking a prompt that does not fit beside others waits for the next round."""
    a, b = request("a", 5, max_tokens=2), request("b", 4, max_tokens=1)
    h = harness(Tgi(chunking=False, max_batch_prefill_tokens=8), 100)
    h.add(a, b)
    assert Table(h, a, b).finish() == [[("a", 0, 5)], [("b", 0, 4)], [("a", 5, 1)]]


def test_memory_is_reserved_to_the_end() -> None:
    """a takes 3 + 5 - 1 slots, b 2 + 2 - 1: ten are enough, nine are not."""
    for total, started in ((10, [("a", 0, 3), ("b", 0, 2)]), (9, [("a", 0, 3)])):
        a, b = request("a", 3, max_tokens=5), request("b", 2, max_tokens=2)
        h = harness(Tgi(max_batch_total_tokens=total), 50)
        h.add(a, b)
        assert Table(h, a, b).step() == started


def test_batch_size() -> None:
    """Without chunking at most three run."""
    asked = [request(name, 2, max_tokens=3) for name in "abcd"]
    h = harness(Tgi(chunking=False, max_batch_size=3), 100)
    h.add(*asked)
    assert Table(h, *asked).run(2) == [[(name, 0, 2) for name in "abc"], [(name, 2, 1) for name in "abc"]]


def test_what_no_batch_can_hold_is_refused() -> None:
    """With the numbers, and the next one is served."""
    h = harness(Tgi(chunking=False, max_batch_prefill_tokens=8, max_batch_total_tokens=12), 50)
    h.add(request("prompt", 9, max_tokens=1), request("total", 8, max_tokens=6), request("fits", 8, max_tokens=5))
    h.run()
    assert h.reason("prompt") is FinishReason.REFUSED
    assert "9 tokens, but max_batch_prefill_tokens is 8" in h.finished["prompt"].message
    assert (
        "reserves 13 tokens of memory, but max_batch_total_tokens allows 12 blocks of 1" in h.finished["total"].message
    )
    assert h.reason("fits") is FinishReason.LENGTH


@pytest.mark.parametrize("preset", [Tgi(), Tgi(chunking=False), Tgi(chunking=False, waiting_served_ratio=1.2)])
def test_nobody_is_ever_preempted(preset: Tgi) -> None:
    """On random traces."""
    run = run_traces(150, lambda seed: preset)
    assert sum(h.scheduler.counters.num_preemptions for h in run) == 0


def test_knobs_are_checked() -> None:
    """An impossible value is named."""
    with pytest.raises(ValueError, match="waiting_served_ratio must be at least 0, got -1"):
        Tgi(waiting_served_ratio=-1.0)
    with pytest.raises(ValueError, match=r"at most 50 .*got 51"):
        harness(Tgi(max_batch_total_tokens=51), 50)
