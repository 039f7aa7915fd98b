"""nano-vllm, pass by pass."""

from __future__ import annotations

from collections.abc import Callable

from hopon.core.policy.systems.nano import Nano
from tests.core.harness import Harness, config, request
from tests.core.systems.drive import run_trace, schedule


def make(num_blocks: int, **changes: object) -> Harness:
    fields = {"block_size": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 8}
    settings = config(num_blocks, **(fields | changes))
    return Harness.make(settings, policy=Nano().policy(settings))


def test_prefill_first_and_only_the_first_is_cut() -> None:
    """Budget 8: c does not fit beside a and b and is not cut; d is cut, being the first; decodes come last."""
    h = make(100)
    asked = request("a", 5, 3), request("b", 2, 2), request("c", 4, 1), request("d", 20, 1)
    h.add(*asked)
    h.run()
    assert schedule(h, *asked) == [
        [("a", 0, 5), ("b", 0, 2)],
        [("c", 0, 4)],
        [("d", 0, 8)],
        [("d", 8, 8)],
        [("d", 16, 4)],
        [("a", 5, 1), ("b", 2, 1)],
        [("a", 6, 1)],
    ]


def test_whole_prompts_join_the_last_piece() -> None:
    """The rest of a cut prompt comes first, even when it is one token; others fill the budget beside it."""
    h = make(100)
    asked = request("a", 9, 2), request("b", 7, 1), request("c", 1, 1)
    h.add(*asked)
    h.run()
    assert schedule(h, *asked) == [
        [("a", 0, 8)],
        [("a", 8, 1), ("b", 0, 7)],
        [("c", 0, 1)],
        [("a", 9, 1)],
    ]


def test_decode_preempts_the_last() -> None:
    """Eight slots for two: b loses all of it in the third pass, waits until its five tokens fit, and recomputes."""
    h = make(8)
    asked = request("a", 3, 5), request("b", 3, 5)
    h.add(*asked)
    h.run()
    assert schedule(h, *asked) == [
        [("a", 0, 3), ("b", 0, 3)],
        [("a", 3, 1), ("b", 3, 1)],
        [("a", 4, 1)],
        [("a", 5, 1)],
        [("a", 6, 1)],
        [("b", 0, 5)],
        [("b", 5, 1)],
        [("b", 6, 1)],
    ]


def test_a_newcomer_stalls_decodes() -> None:
    """Whoever arrives and fits is computed before anybody decodes again."""
    h = make(100)
    asked = a, b = request("a", 3, 3), request("b", 4, 1)
    h.add(a)
    h.step()
    h.add(b)
    h.run()
    assert schedule(h, *asked) == [[("a", 0, 3)], [("b", 0, 4)], [("a", 3, 1)], [("a", 4, 1)]]


def test_a_pass_is_prompts_or_decodes(effort: Callable[[int, int], int]) -> None:
    """Random traces, one step in flight: no pass that starts somebody computes for those who have run; at most one
    prompt of a pass is unfinished."""
    for seed in range(effort(60, 1000)):
        driver = run_trace("nano", seed)
        known: set[int] = set()
        prefilling: set[int] = set()
        for plan in driver.plans:
            new = {opened.row for opened in plan.opened}
            known -= set(plan.closed)
            prefilling -= set(plan.closed)
            rows = {chunk.row for chunk in plan.chunks}
            cut = {chunk.row for chunk in plan.chunks if not chunk.sample}
            assert len(cut) <= 1
            if new | (rows & prefilling):
                assert rows <= new | prefilling, f"trace {seed}: decodes beside prompts"
            prefilling = (prefilling - rows) | cut
            known |= new
