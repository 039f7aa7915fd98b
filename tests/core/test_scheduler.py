"""The default policy, step by step: budgets, admission, growth, preemption, prefix hits, ends."""

from __future__ import annotations

from typing import Any

import pytest

from hopon.core.config import SchedulerConfig
from hopon.core.types import FinishReason, SamplingParams
from tests.core.harness import Harness, config, request


def chunks(harness: Harness) -> list[list[tuple[int, int, int]]]:
    """(row, start, count) of every plan that computed something."""
    return [[(c.row, c.start, c.count) for c in plan.chunks] for plan in harness.plans if plan.chunks]


def test_decodes_come_first_then_running_prefill_then_newcomers() -> None:
    """A hand-worked schedule: budget 8, a short prompt, a long one, then a third."""
    h = Harness.make(config(max_num_batched_tokens=8, max_num_seqs=4))
    h.add(request("a", 3, max_tokens=4), request("b", 14, max_tokens=2), request("c", 2, max_tokens=1))
    h.run()
    assert chunks(h) == [
        [(0, 0, 3), (1, 0, 5)],
        [(0, 3, 1), (1, 5, 7)],
        [(0, 4, 1), (1, 12, 2), (2, 0, 2)],
        [(0, 5, 1), (1, 14, 1)],
    ]


def test_v001_a_budget_below_the_longest_prompt_needs_chunks() -> None:
    """Without chunked prefill such a configuration is refused with both numbers."""
    with pytest.raises(ValueError, match=r"max_num_batched_tokens 64 .*max_model_len 100"):
        config(enable_chunked_prefill=False, max_model_len=100)


def test_v001_without_chunks_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    """Prompts are never split, and nobody behind them is lost."""
    h = Harness.make(config(enable_chunked_prefill=False, max_model_len=64))
    h.add(request("a", 50), request("b", 50), request("c", 5))
    h.run()
    firsts = [c for plan in h.plans for c in plan.chunks if c.start == 0]
    assert [c.count for c in firsts] == [50, 50, 5]
    assert {h.reason(n) for n in "abc"} == {FinishReason.LENGTH}


def test_v002_a_budget_above_the_longest_prompt_is_fine() -> None:
    """The budget is shared by many requests."""
    h = Harness.make(config(max_model_len=256, max_num_batched_tokens=2048))
    h.add(*(request(str(i), 100) for i in range(8)))
    assert len(h.step().chunks) == 8


def test_v003_a_head_that_does_not_fit_holds_the_queue_until_it_does() -> None:
    """Strictly first come, first served: small requests wait behind a big one, and it is served first."""
    h = Harness.make(config(10, max_num_batched_tokens=512))
    h.add(request("big", 96, max_tokens=20))
    h.step()
    h.add(request("head", 128, max_tokens=2), request("small", 3, max_tokens=2))
    order: list[str] = []
    while h.scheduler.has_work:
        h.step()
        order += [name for name in h.finished if name not in order]
    assert order == ["big", "head", "small"] or order == ["big", "small", "head"]
    opened = [o.prompt for plan in h.plans for o in plan.opened]
    assert [len(p) for p in opened] == [96, 128, 3]


def test_v005_admission_looks_at_the_whole_prompt() -> None:
    """Five prompts of half the pool each, computed in small chunks, do not start together only to evict each other."""
    h = Harness.make(config(20, max_num_batched_tokens=32))
    h.add(*(request(str(i), 160, max_tokens=4) for i in range(5)))
    h.run()
    counters = h.scheduler.counters
    assert all(h.reason(str(i)) is FinishReason.LENGTH for i in range(5))
    assert counters.num_preemptions <= 5
    assert counters.num_recomputed_tokens <= 0.25 * 5 * 164


def test_v006_every_step_serves_all_running_decodes() -> None:
    """While a long prompt is computed, each decoding sequence gets its token in every step."""
    h = Harness.make(config())
    h.add(*(request(f"d{i}", 4, max_tokens=60) for i in range(5)))
    h.step()
    h.add(request("long", 700, max_tokens=1))
    for _ in range(11):
        plan = h.step()
        assert sum(c.count == 1 and c.sample for c in plan.chunks) == 5
        assert plan.num_tokens == 64


def test_v007_every_seat_has_a_token_in_the_budget() -> None:
    """A budget below the number of seats could starve prefills for ever: refused with both numbers."""
    with pytest.raises(ValueError, match=r"max_num_batched_tokens 4 .*max_num_seqs 8"):
        config(max_num_batched_tokens=4)


def test_v007_decodes_leave_a_prompt_its_share() -> None:
    """With the smallest allowed budget a waiting prompt still advances in the step after it has a seat."""
    h = Harness.make(config(max_num_batched_tokens=8))
    h.add(*(request(f"d{i}", 1, max_tokens=50) for i in range(7)))
    h.step()
    h.add(request("p", 20))
    plan = h.step()
    assert [c.count for c in plan.chunks if c.start == 0] == [1]


def test_v008_the_preempted_resume_before_the_unstarted() -> None:
    """A victim goes ahead of a request of the same priority that never started, even one that came earlier."""
    h = Harness.make(config(9, max_num_seqs=2, max_num_batched_tokens=128))
    h.add(request("old", 60, max_tokens=30), request("victim", 50, max_tokens=30), request("never", 16, max_tokens=1))
    h.until(lambda: h.scheduler.counters.num_preemptions)
    h.run()
    opened = [len(o.prompt) for plan in h.plans for o in plan.opened]
    assert opened == [60, 50, 50, 16]


def test_v009_a_victim_of_this_step_leaves_the_step() -> None:
    """Whoever is preempted while a step is planned is not in it, and its tokens go back to the budget."""
    h = Harness.make(config(3, block_size=16, max_num_seqs=4))
    low = request("low", 15, max_tokens=40, priority=5)
    high = request("high", 15, max_tokens=40, priority=0)
    h.add(low)
    h.step()
    h.add(high)
    for _ in range(60):
        plan = h.step()
        rows = {c.row for c in plan.chunks}
        assert rows <= set(h.rows)
        if h.scheduler.counters.num_preemptions:
            break
    assert h.scheduler.counters.num_preemptions == 1
    h.run()
    assert len(h.outputs["high"]) == 34, "high is never preempted and fills the pool in the end"
    assert len(h.outputs["low"]) == 34, "low resumes and fills it too"


def test_v010_the_next_free_seat_goes_to_the_better_priority() -> None:
    """Smaller goes first; equal priorities stay in order of arrival."""
    h = Harness.make(config(max_num_seqs=1))
    h.add(request("running", 4, max_tokens=3))
    h.step()
    h.add(request("b", 4, priority=10), request("c", 4, priority=10), request("a", 4, priority=0))
    h.run()
    assert list(h.finished) == ["running", "a", "b", "c"]


def test_v011_the_oldest_runs_to_its_end() -> None:
    """Four sequences that outgrow the pool together: the first is never preempted, all finish, work is bounded."""
    h = Harness.make(config(10, max_num_batched_tokens=128))
    h.add(*(request(str(i), 48, max_tokens=48) for i in range(4)))
    reopened: list[tuple[int, ...]] = []
    while h.scheduler.has_work:
        reopened += [o.prompt for o in h.step().opened if o.output]
    assert request("0", 48).prompt not in reopened
    assert {h.reason(str(i)) for i in range(4)} == {FinishReason.LENGTH}
    assert h.scheduler.counters.num_recomputed_tokens <= 4 * 96


def test_v012_seats_are_conserved() -> None:
    """Many short requests, a third of them aborted, on few seats: the rest finish and every seat comes back."""
    h = Harness.make(config(max_num_seqs=4))
    for wave in range(20):
        h.add(*(request(f"{wave}.{i}", 5, max_tokens=3) for i in range(8)))
        h.step()
        for i in (0, 3, 6):
            h.abort(f"{wave}.{i}")
    h.run()
    assert len(h.finished) == 160
    assert len(h.scheduler._free_rows) == 4
    assert h.scheduler.pool.num_free == 64


def test_v014_throughput_degrades_smoothly_under_memory_pressure() -> None:
    """With a pool for a third of what the running sequences want, less is computed again than is computed at all."""
    h = Harness.make(config(40, max_num_seqs=16, max_num_batched_tokens=256))
    h.add(*(request(str(i), 64, max_tokens=64) for i in range(40)))
    h.run()
    counters = h.scheduler.counters
    useful = counters.num_scheduled_tokens - counters.num_recomputed_tokens
    assert counters.num_recomputed_tokens <= 0.5 * useful


def test_v015_overload_does_not_thrash() -> None:
    """Every preemption of a request is followed by a token of it before its next one; all finish."""
    h = Harness.make(config(24, max_num_seqs=32, max_num_batched_tokens=64))
    h.add(*(request(str(i), 20 + 7 * (i % 9), max_tokens=40 + i % 30) for i in range(100)))
    opened: dict[tuple[int, ...], list[int]] = {}
    while h.scheduler.has_work:
        for o in h.step().opened:
            opened.setdefault(o.prompt, []).append(len(o.output))
    assert {d.finish for d in h.finished.values()} == {FinishReason.LENGTH}
    assert max(len(times) for times in opened.values()) <= 6
    for times in opened.values():
        resumed = times[1:]
        assert resumed == sorted(set(resumed)), "preempted twice without a token in between"


def test_v016_and_v017_a_resumed_sequence_keeps_its_border() -> None:
    """After a preemption the whole history is recomputed in chunks and sampled once, behind its end."""
    h = Harness.make(config(6, max_num_batched_tokens=16, max_num_seqs=4))
    h.add(request("a", 40, max_tokens=40), request("b", 20, max_tokens=30))
    h.run()
    again = [o for plan in h.plans for o in plan.opened if o.output]
    assert again, "this pool must force a preemption"
    assert all(len(o.prompt) == 20 for o in again)
    assert len(h.outputs["a"]) == 40
    assert len(h.outputs["b"]) == 30


def test_v019_alone_and_too_long_ends_with_length() -> None:
    """A sequence that fills the whole pool ends with what it has, and the next one is served."""
    h = Harness.make(config(8))
    h.add(request("a", 100, max_tokens=200), request("b", 10, max_tokens=2))
    h.run()
    assert h.reason("a") is FinishReason.LENGTH
    assert len(h.outputs["a"]) == 8 * 16 - 100 + 1
    assert len(h.outputs["b"]) == 2


def test_v020_cached_tokens_stay_below_the_prompt() -> None:
    """Preemption and resumption never add to the reported hits."""
    h = Harness.make(config(6, max_num_batched_tokens=64, max_num_seqs=4))
    h.add(request("a", 40, max_tokens=40), request("b", 32, max_tokens=40))
    h.run()
    assert h.scheduler.counters.num_preemptions > 0
    assert {d.cached_tokens for d in h.finished.values()} == {0}
    h.add(request("a2", request("a", 40).prompt))
    h.run()
    assert h.finished["a2"].cached_tokens in (16, 32)


def test_v021_an_abort_in_the_queue_leaves_no_pin() -> None:
    """Looking a prefix up pins nothing: references are as before the request came."""
    h = Harness.make(config(8, max_num_seqs=1))
    h.add(request("first", 33, max_tokens=2))
    h.run()
    h.add(request("running", 90, max_tokens=20))
    h.step()
    before = list(h.scheduler.pool._references)
    h.add(request("late", request("first", 33).prompt))
    h.step()
    h.abort("late")
    assert h.scheduler.pool._references == before
    h.run()


def test_v024_abort_in_mid_prefill_takes_effect_at_once() -> None:
    """The next plan has nothing of the request any more and its blocks are free."""
    h = Harness.make(config(64))
    h.add(request("long", 700))
    h.step()
    h.abort("long")
    assert h.scheduler.pool.num_free == 64
    assert not h.step().chunks
    assert h.reason("long") is FinishReason.ABORT


def test_v030_finished_requests_leave_their_blocks() -> None:
    """Fifty different prompts one after another through a pool of two."""
    h = Harness.make(config(8))
    for i in range(50):
        h.add(request(str(i), 60, max_tokens=2))
        h.run()
    assert len(h.finished) == 50
    assert h.scheduler.pool.num_evictions > 0


def test_v032_more_than_the_last_prompt_is_remembered() -> None:
    """Long A, short B, long A again: the second A is a hit."""
    h = Harness.make(config(32))
    for name, like in (("a", "a"), ("b", "b"), ("c", "a")):
        h.add(request(name, request(like, 100 if like == "a" else 20).prompt))
        h.run()
    assert h.finished["c"].cached_tokens == 96


@pytest.mark.parametrize(("shared", "hit"), [(15, 0), (16, 16), (33, 32)])
def test_v033_hits_are_whole_blocks(shared: int, hit: int) -> None:
    """A shared prefix counts in full blocks."""
    h = Harness.make(config())
    common = tuple(range(100, 100 + shared))
    h.add(request("a", (*common, *range(500, 530))))
    h.run()
    h.add(request("b", (*common, *range(600, 630))))
    h.run()
    assert h.finished["b"].cached_tokens == hit


def test_v036_a_fully_cached_prompt_still_computes_a_token() -> None:
    """A hit never covers the whole prompt: at least one token is computed, and the answer is not empty."""
    h = Harness.make(config(max_model_len=128))
    prompt = tuple(range(100, 196))
    for name in "ab":
        h.add(request(name, prompt, max_tokens=4))
        h.run()
    assert h.finished["b"].cached_tokens == 80
    assert len(h.outputs["b"]) == 4


def test_prompts_that_can_never_fit_are_refused_with_the_numbers() -> None:
    """Too long for the model, or for the pool: one REFUSED delta, and everybody else is served."""
    h = Harness.make(config(4))
    h.add(request("model", 1024), request("pool", 65), request("fits", 64, max_tokens=1))
    h.run()
    assert h.reason("model") is FinishReason.REFUSED
    assert "1024 tokens" in h.finished["model"].message
    assert "5 KV blocks of 16" in h.finished["pool"].message
    assert h.reason("fits") is FinishReason.LENGTH


def test_max_tokens_and_model_length_end_exactly() -> None:
    """max_tokens=1 ends in the prefill step; without max_tokens the model's length is the end."""
    h = Harness.make(config(max_model_len=50))
    open_end = SamplingParams(max_tokens=None, temperature=0.0)
    h.add(request("one", 30, max_tokens=1), request("all", 30, params=open_end))
    h.run()
    assert len(h.outputs["one"]) == 1
    assert len(h.outputs["all"]) == 20


def test_one_prompt_takes_no_more_than_its_threshold() -> None:
    """long_prefill_token_threshold limits a chunk of one prompt apart from the step's budget."""
    h = Harness.make(config(long_prefill_token_threshold=20))
    h.add(request("a", 50), request("b", 50))
    assert [c.count for c in h.step().chunks] == [20, 20]


def test_replayed_output_goes_on_where_it_stopped() -> None:
    """A request that comes with delivered output continues its indexes and its limits."""
    h = Harness.make(config())
    h.outputs["r"] = [11, 12, 13]
    h.add(request("r", 10, max_tokens=5, output=(11, 12, 13)))
    h.run()
    assert len(h.outputs["r"]) == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_blocks", 0), ("block_size", 12), ("block_size", 0), ("max_num_seqs", 0)],
)
def test_bad_settings_name_the_value(field: str, value: Any) -> None:
    """A setting out of range is an error that names the field and the value."""
    with pytest.raises(ValueError, match=f"{field} .*{value}"):
        config(**({"num_blocks": 64} | {field: value}))


def test_plans_do_not_depend_on_end_of_sequence_yet_to_come() -> None:
    """Two runs that differ in one request's stop token make the same plans up to that token."""
    plans = []
    for stop in ((), tuple(range(10, 60))):
        h = Harness.make(config())
        h.add(request("a", 20, max_tokens=30, stop_token_ids=stop), request("b", 100, max_tokens=30))
        h.step()
        plans.append(h.plans[0].chunks)
    assert plans[0] == plans[1]


def test_config_counts_its_tokens() -> None:
    """The pool's capacity in tokens."""
    assert SchedulerConfig(num_blocks=10, block_size=16, max_model_len=100).capacity_tokens == 160
