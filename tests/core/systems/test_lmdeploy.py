"""LMDeploy's PyTorch engine: whose turn it is, what a turn of prompts holds, whose memory is taken."""

from __future__ import annotations

import pytest

from hopon.core.plan import StepPlan
from hopon.core.policy.systems.lmdeploy import LmDeploy
from tests.core.harness import Harness, request
from tests.core.systems.runs import Table, harness, run_traces


def test_turns() -> None:
    """Worked by hand: half of four seats are taken, so c waits for three decode turns and then gets one of prompts."""
    a, b, c = request("a", 3, max_tokens=6), request("b", 3, max_tokens=6), request("c", 2, max_tokens=2)
    h = harness(LmDeploy(prefill_interval=3), 100, max_num_seqs=4, max_num_batched_tokens=8)
    table = Table(h, a, b, c)
    h.add(a, b)
    first = table.step()
    h.add(c)
    assert [first, *table.finish()] == [
        [("a", 0, 3), ("b", 0, 3)],
        [("a", 3, 1), ("b", 3, 1)],
        [("a", 4, 1), ("b", 4, 1)],
        [("a", 5, 1), ("b", 5, 1)],
        [("c", 0, 2)],
        [("a", 6, 1), ("b", 6, 1), ("c", 2, 1)],
        [("a", 7, 1), ("b", 7, 1)],
    ]


@pytest.mark.parametrize(("seats", "length", "second"), [(4, 8, "c"), (4, 7, "a"), (5, 2, "c")])
def test_prompts_get_their_turn_at_once(seats: int, length: int, second: str) -> None:
    """When as many tokens wait as a turn holds (8), or fewer sequences run than half of the seats."""
    a, b, c = request("a", 3, max_tokens=6), request("b", 3, max_tokens=6), request("c", length, max_tokens=2)
    h = harness(LmDeploy(), 100, max_num_seqs=seats, max_num_batched_tokens=8)
    table = Table(h, a, b, c)
    h.add(a, b)
    table.step()
    h.add(c)
    assert table.step()[0][0] == second


def test_a_long_prompt_has_turns_of_its_own() -> None:
    """Only the first of a turn is cut, and the turn ends with it; behind others a prompt waits until it fits whole."""
    asked = [request("a", 20, max_tokens=1), request("b", 2, max_tokens=1), request("c", 7, max_tokens=1)]
    h = harness(LmDeploy(), 100, max_num_seqs=4, max_num_batched_tokens=8)
    h.add(*asked)
    assert Table(h, *asked).finish() == [
        [("a", 0, 8)],
        [("a", 8, 8)],
        [("a", 16, 4), ("b", 0, 2)],
        [("c", 0, 7)],
    ]


def test_the_last_computes_again() -> None:
    """Pool 12: after step 3 both hold 6. In step 4 a takes the memory of b, which has to wait for 7 free tokens."""
    a, b = request("a", 4, max_tokens=8), request("b", 4, max_tokens=8)
    h = harness(LmDeploy(), 12, max_num_seqs=4, enable_prefix_caching=False)
    h.add(a, b)
    assert Table(h, a, b).finish()[3:] == [
        *([("a", start, 1)] for start in range(6, 11)),
        [("b", 0, 7)],
        *([("b", start, 1)] for start in range(7, 11)),
    ]


@pytest.mark.parametrize(("length", "resumed"), [(4, ("b", 6, 1)), (8, ("b", 0, 7))])
def test_who_needs_memory_itself_waits_with_what_it_has(length: int, resumed: tuple[str, int, int]) -> None:
    """Pool 13: in step 4 a takes the last token and b, the last, finds none: it waits and keeps 6. When a ends then,
    b goes on where it was; when a goes on, it takes all of b in step 5."""
    a, b = request("a", 4, max_tokens=length), request("b", 4, max_tokens=8)
    h = harness(LmDeploy(), 13, max_num_seqs=4, enable_prefix_caching=False)
    h.add(a, b)
    steps = Table(h, a, b).finish()
    assert steps[:4] == [
        [("a", 0, 4), ("b", 0, 4)],
        [("a", 4, 1), ("b", 4, 1)],
        [("a", 5, 1), ("b", 5, 1)],
        [("a", 6, 1)],
    ]
    assert next(row for rows in steps[4:] for row in rows if row[0] == "b") == resumed
    assert h.scheduler.counters.num_recomputed_tokens == (0 if length == 4 else 6)


def test_random_traces() -> None:
    """No step has prompts and decodes, and the oldest is never preempted."""
    sampled: dict[int, bool] = {}
    oldest: dict[str, int] = {}

    def watch(h: Harness, plan: StepPlan) -> None:
        if len(h.plans) == 1:
            oldest.clear()
        for opened in plan.opened:
            sampled[opened.row] = False
        assert len({sampled[chunk.row] for chunk in plan.chunks}) < 2, "prompts and decodes in one step"
        for chunk in plan.chunks:
            sampled[chunk.row] = sampled[chunk.row] or chunk.sample
        for name, sequence in list(h.scheduler._sequences.items())[:1]:
            assert sequence.num_preemptions == oldest.setdefault(name, sequence.num_preemptions)

    run = run_traces(100, lambda seed: LmDeploy(prefill_interval=1 + seed % 9), watch=watch, depths=(1,))
    assert sum(h.scheduler.counters.num_preemptions for h in run) > 50
    run_traces(60, lambda seed: LmDeploy())


def test_knobs_are_checked() -> None:
    """An impossible value is named."""
    with pytest.raises(ValueError, match="prefill_interval must be at least 1, got 0"):
        LmDeploy(prefill_interval=0)
