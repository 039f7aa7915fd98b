"""vLLM: hand-worked schedules of both engines, with their ways of preempting."""

from __future__ import annotations

import pytest

from hopon.core.plan import StepPlan
from hopon.core.policy.systems.vllm import Vllm, VllmV0
from hopon.core.types import FinishReason
from tests.core.harness import Harness, request
from tests.core.systems.runs import Table, harness, run_trace, run_traces

PLAIN = {"enable_prefix_caching": False}


def test_v0_prompts_stall_decodes_and_the_newest_recomputes() -> None:
    """Worked by hand: 12 slots; a (4 tokens, 5 to generate), b (5, 4), and c (2, 2) a step later."""
    a, b, c = request("a", 4, max_tokens=5), request("b", 5, max_tokens=4), request("c", 2, max_tokens=2)
    h = harness(VllmV0(watermark=0.0), 12, **PLAIN)
    h.add(a, b)
    table = Table(h, a, b, c)
    first = table.step()
    h.add(c)
    assert [first, *table.finish()] == [
        [("a", 0, 4), ("b", 0, 5)],
        [("c", 0, 2)],  # prompts only: a and b stall
        [("a", 4, 1), ("b", 5, 1)],  # b finds no block: c, the last, gives two back
        [("a", 5, 1)],  # b finds no block and is the last itself
        [("a", 6, 1)],  # b would need 7 of 6
        [("a", 7, 1)],
        [("b", 0, 7), ("c", 0, 3)],  # both from the front, in order of arrival, prompt and output
        [("b", 7, 1)],
    ]
    assert h.scheduler.counters.num_preemptions == 2


def test_v0_swapped_ones_come_back_before_any_prompt() -> None:
    """The same with a host tier: nothing is computed twice, and d, which would fit, waits for b and c."""
    a, b, c = request("a", 4, max_tokens=5), request("b", 5, max_tokens=4), request("c", 2, max_tokens=2)
    d = request("d", 1, max_tokens=1)
    h = harness(VllmV0(preemption="swap", watermark=0.0), 12, num_host_blocks=20, **PLAIN)
    h.add(a, b)
    table = Table(h, a, b, c, d)
    steps = table.run(1)
    h.add(c)
    steps += table.run(2)
    h.add(d)
    assert steps + table.finish() == [
        [("a", 0, 4), ("b", 0, 5)],
        [("c", 0, 2)],
        [("a", 4, 1), ("b", 5, 1)],  # c moves out
        [("a", 5, 1)],  # b moves out
        [("a", 6, 1)],
        [("a", 7, 1)],
        [("b", 6, 1), ("c", 2, 1)],  # back, each with its next token
        [("d", 0, 1)],
        [("b", 7, 1)],
    ]
    assert h.scheduler.counters.num_recomputed_tokens == 0
    assert h.scheduler.counters.num_moved_blocks == 2 * (2 + 6)


def test_v0_the_watermark_stays_free_beside_others() -> None:
    """A tenth of 20 slots: beside 10 tokens, 9 more do not start and 8 do."""
    for length, started in ((9, [("a", 0, 10)]), (8, [("a", 0, 10), ("b", 0, 8)])):
        a, b = request("a", 10), request("b", length)
        h = harness(VllmV0(watermark=0.1), 20, **PLAIN)
        h.add(a, b)
        assert Table(h, a, b).step() == started


def test_v0_delay() -> None:
    """Twice the second that a pass of prompts takes: b, which came at 1, starts in the step at 4 and not before."""
    a, b = request("a", 2, max_tokens=9), request("b", 2, arrival=1.0)
    h = harness(VllmV0(delay_factor=2.0), 100, **PLAIN)
    h.add(a)
    table = Table(h, a, b)
    steps = table.run(1)
    h.add(b)
    steps += table.run(3)
    assert steps == [[("a", 0, 2)], [("a", 2, 1)], [("a", 3, 1)], [("b", 0, 2)]]


def test_v0_what_can_outgrow_a_pass_is_refused() -> None:
    """With the numbers; the next one is served."""
    h = harness(VllmV0(), 100, max_num_batched_tokens=8)
    h.add(request("long", 5, max_tokens=5), request("fits", 5, max_tokens=4))
    h.run()
    assert h.reason("long") is FinishReason.REFUSED
    assert "9 tokens, but max_num_batched_tokens is 8" in h.finished["long"].message
    assert h.reason("fits") is FinishReason.LENGTH


def test_v0_what_can_outgrow_a_pass_is_refused_behind_others_too() -> None:
    """A prompt that starts in the same pass as one in front of it is looked at like that one."""
    a, b = request("a", 2, max_tokens=2), request("b", 4, max_tokens=6)
    h = harness(VllmV0(watermark=0.0), 20, max_num_batched_tokens=8, **PLAIN)
    h.add(a, b)
    assert Table(h, a, b).finish() == [[("a", 0, 2)], [("a", 2, 1)]]
    assert h.finished["b"].finish is FinishReason.REFUSED
    assert "9 tokens, but max_num_batched_tokens is 8" in h.finished["b"].message


def test_v018_a_full_host_tier_means_computing_again() -> None:
    """With two host blocks for the choices of two prompts, who finds no room there is recomputed, and all end."""
    h = harness(VllmV0(preemption="swap", watermark=0.0), 24, num_host_blocks=2, **PLAIN)
    for name in ("a", "b"):
        leader = request(f"{name}0", 4, max_tokens=9)
        h.add(leader, request(f"{name}1", leader.prompt, max_tokens=9, choice=1, leader=f"{name}0"))
    h.run()
    assert {name: end.finish for name, end in h.finished.items()} == dict.fromkeys(h.outputs, FinishReason.LENGTH)
    assert len(h.finished) == 4
    assert h.scheduler.counters.num_preemptions
    assert h.scheduler.counters.num_recomputed_tokens


def test_v0_swapping_needs_a_host_tier() -> None:
    """The config is refused with the field at fault."""
    with pytest.raises(ValueError, match="num_host_blocks is 0"):
        harness(VllmV0(preemption="swap"), 100)


@pytest.mark.parametrize("swap", [False, True])
def test_v0_passes_are_pure(swap: bool) -> None:
    """On random traces a pass that opens rows has nothing but theirs, unless they come back from the host; and a swap
    computes nothing twice."""

    def watch(h: Harness, plan: StepPlan) -> None:
        if plan.opened and not any(move.kind == "from_host" for move in plan.moves):
            assert {chunk.row for chunk in plan.chunks} == {opened.row for opened in plan.opened}

    changes = {"num_host_blocks": 500, "max_num_batched_tokens": 100}
    preset = VllmV0(preemption="swap" if swap else "recompute")
    counters = [h.scheduler.counters for h in run_traces(100, lambda seed: preset, changes=changes, watch=watch)]
    assert sum(c.num_preemptions for c in counters) > 20
    assert (sum(c.num_moved_blocks for c in counters) > 0) == swap
    assert (sum(c.num_recomputed_tokens for c in counters) == 0) == swap


def test_v1_everybody_takes_what_is_left() -> None:
    """Worked by hand: budget 6; a (3 tokens, 3 to generate), b (10, 2), c (2, 2)."""
    a, b, c = request("a", 3, max_tokens=3), request("b", 10, max_tokens=2), request("c", 2, max_tokens=2)
    h = harness(Vllm(), 100, max_num_batched_tokens=6, max_num_seqs=6)
    h.add(a, b, c)
    assert Table(h, a, b, c).finish() == [
        [("a", 0, 3), ("b", 0, 3)],
        [("a", 3, 1), ("b", 3, 5)],
        [("a", 4, 1), ("b", 8, 2), ("c", 0, 2)],
        [("b", 10, 1), ("c", 2, 1)],
    ]


def test_v1_threshold() -> None:
    """At most 2 tokens of one sequence: prompts advance side by side, in order of admission whatever their phase."""
    a, b, c = request("a", 3, max_tokens=3), request("b", 10, max_tokens=2), request("c", 2, max_tokens=2)
    h = harness(Vllm(long_prefill_token_threshold=2), 100, max_num_batched_tokens=6, max_num_seqs=6)
    h.add(a, b, c)
    assert Table(h, a, b, c).run(2) == [
        [("a", 0, 2), ("b", 0, 2), ("c", 0, 2)],
        [("a", 2, 1), ("b", 2, 2), ("c", 2, 1)],
    ]


def test_v1_room_for_all_of_it_beside_running_prompts() -> None:
    """12 slots: a needs 8 and has taken 2, so that 4 are left for b, which needs 5; its first chunk alone would fit."""
    for full, expected in ((True, [("a", 0, 2)]), (False, [("a", 0, 2), ("b", 0, 2)])):
        a, b = request("a", 8), request("b", 5)
        h = harness(Vllm(long_prefill_token_threshold=2, scheduler_reserve_full_isl=full), 12)
        h.add(a, b)
        assert Table(h, a, b).step() == expected


def test_v1_the_last_is_preempted_and_nobody_starts_in_that_step() -> None:
    """Worked by hand: 10 slots, a and b of 4 tokens; in step 3 a takes b's memory, and c waits although it fits."""
    a, b, c = request("a", 4, max_tokens=5), request("b", 4, max_tokens=5), request("c", 1, max_tokens=1)
    h = harness(Vllm(), 10, **PLAIN)
    h.add(a, b)
    table = Table(h, a, b, c)
    steps = table.run(2)
    h.add(c)
    assert steps + table.finish() == [
        [("a", 0, 4), ("b", 0, 4)],
        [("a", 4, 1), ("b", 4, 1)],
        [("a", 5, 1)],
        [("a", 6, 1)],  # b's six tokens do not fit into three slots, and c stands behind it
        [("a", 7, 1)],
        [("b", 0, 6), ("c", 0, 1)],
        [("b", 6, 1)],
        [("b", 7, 1)],
    ]


def test_v1_a_victim_that_was_served_gives_its_token_back() -> None:
    """Worked by hand: budget 4, 16 slots. In step 5 l (priority 5) takes the last slot; h takes it from l, and k gets
    the three tokens that are left."""
    low = request("l", 3, max_tokens=20, priority=5)
    h, k = request("h", 3, max_tokens=20), request("k", 9, max_tokens=1)
    run = harness(
        Vllm(scheduling_policy="priority", scheduler_reserve_full_isl=False),
        16,
        max_num_batched_tokens=4,
        max_num_seqs=4,
        **PLAIN,
    )
    table = Table(run, low, h, k)
    run.add(low)
    steps = table.run(1)
    run.add(h)
    steps += table.run(1)
    run.add(k)
    assert steps + table.run(5) == [
        [("l", 0, 3)],
        [("l", 3, 1), ("h", 0, 3)],
        [("l", 4, 1), ("h", 3, 1), ("k", 0, 2)],
        [("l", 5, 1), ("h", 4, 1), ("k", 2, 2)],
        [("h", 5, 1), ("k", 4, 3)],
        [("h", 6, 1), ("k", 7, 2)],
        [("h", 7, 1), ("l", 0, 3)],
    ]


def test_v1_nobody_runs_behind_one_that_is_its_own_victim() -> None:
    """Worked by hand: x, admitted first, has the lowest priority and finds no slot: the step is empty."""
    x, y = request("x", 3, priority=9), request("y", 3)
    h = harness(Vllm(scheduling_policy="priority"), 7, **PLAIN)
    table = Table(h, x, y)
    h.add(x)
    steps = table.run(1)
    h.add(y)
    assert steps + table.run(3) == [[("x", 0, 3)], [("x", 3, 1), ("y", 0, 3)], [], [("y", 3, 1)]]


def test_v1_fcfs_ignores_priorities() -> None:
    """The one that came first starts first."""
    a, b = request("a", 4, priority=9), request("b", 4, priority=0)
    h = harness(Vllm(), 100, max_num_seqs=1)
    h.add(a, b)
    assert Table(h, a, b).step() == [("a", 0, 4)]


class NobodyStartsWhereSomebodyHadToGo:
    """Watches one trace."""

    def __init__(self) -> None:
        self.preemptions = 0

    def __call__(self, h: Harness, plan: StepPlan) -> None:
        before, self.preemptions = self.preemptions, h.scheduler.counters.num_preemptions
        assert self.preemptions == before or not plan.opened


@pytest.mark.parametrize("preset", [Vllm(), Vllm(scheduling_policy="priority"), Vllm(scheduler_reserve_full_isl=False)])
def test_v1_random_traces(preset: Vllm) -> None:
    """Everybody ends once; nobody starts in a step that preempts."""
    runs = [run_trace(seed, preset, watch=NobodyStartsWhereSomebodyHadToGo()) for seed in range(150)]
    assert sum(h.scheduler.counters.num_preemptions for h in runs) > 20


def test_knobs_are_checked() -> None:
    """An impossible value is named."""
    with pytest.raises(ValueError, match="preemption must be 'recompute' or 'swap', got 'pause'"):
        VllmV0(preemption="pause")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"watermark must be in \[0, 1\), got 1.0"):
        Vllm(watermark=1.0)
    with pytest.raises(ValueError, match="scheduling_policy must be 'fcfs' or 'priority', got 'lifo'"):
        Vllm(scheduling_policy="lifo")  # type: ignore[arg-type]
