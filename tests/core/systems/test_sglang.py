"""SGLang: prompts first, the guess and its decay, retraction, order by cached prefix."""

from __future__ import annotations

import pytest

from hopon.core.plan import StepPlan
from hopon.core.policy.systems.sglang import NewTokenRatio, SgLang
from hopon.core.sequence import Sequence
from tests.core.harness import Harness, config, request
from tests.core.systems.runs import Table, harness, run_trace, run_traces


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (
            SgLang(chunked_prefill_size=4),
            [
                [("a", 0, 3)],
                [("b", 0, 4)],  # a decode waits for both parts of a prompt
                [("b", 4, 2)],
                [("a", 3, 1), ("b", 6, 1)],
                [("a", 4, 1)],
            ],
        ),
        (
            SgLang(chunked_prefill_size=4, enable_mixed_chunk=True),
            [
                [("a", 0, 3)],
                [("b", 0, 3), ("a", 3, 1)],  # the decode counts in the chunk of 4
                [("b", 3, 3), ("a", 4, 1)],
                [("b", 6, 1)],
            ],
        ),
        (
            SgLang(chunked_prefill_size=4, page_size=2),
            [
                [("a", 0, 3)],
                [("b", 0, 4)],
                [("b", 4, 2)],
                [("a", 3, 1), ("b", 6, 1)],
                [("a", 4, 1)],
            ],
        ),
    ],
)
def test_steps(preset: SgLang, expected: list[list[tuple[str, int, int]]]) -> None:
    """Worked by hand: a (3 tokens, 3 to generate) comes first, b (6, 2) a step later; prompts in chunks of 4."""
    a, b = request("a", 3, max_tokens=3), request("b", 6, max_tokens=2)
    h = harness(preset, 100, block_size=preset.page_size)
    table = Table(h, a, b)
    h.add(a)
    first = table.step()
    h.add(b)
    assert [first, *table.finish()] == expected


def test_the_prompt_that_was_cut_goes_on_before_newcomers_join() -> None:
    """A chunk is filled to its end: by the rest of the cut prompt first, then by others, the last of them cut again."""
    asked = [request("a", 10, max_tokens=1), request("b", 3, max_tokens=1), request("c", 9, max_tokens=1)]
    h = harness(SgLang(chunked_prefill_size=8), 100)
    h.add(*asked)
    assert Table(h, *asked).finish() == [
        [("a", 0, 8)],
        [("a", 8, 2), ("b", 0, 3), ("c", 0, 3)],
        [("c", 3, 6)],
    ]


def test_prompts_are_cut_between_pages() -> None:
    """With pages of 4 a chunk of 10 ends at 8 unless a prompt ends there anyway; less than a page starts nobody."""
    asked = [request("a", 20, max_tokens=1), request("b", 3, max_tokens=1), request("c", 9, max_tokens=1)]
    h = harness(SgLang(chunked_prefill_size=10), 100, block_size=4)
    h.add(*asked)
    assert Table(h, *asked).finish() == [
        [("a", 0, 8)],
        [("a", 8, 8)],
        [("a", 16, 4), ("b", 0, 3)],
        [("c", 0, 9)],
    ]


def test_together_in_full_later_by_the_ratio() -> None:
    """Pool 110, two of 10 + 50: in one step the first counts with all 50, and 61 of b do not fit into 100 - 50. A step
    later it counts with 0.7 * 49, and 61 fit into 65.7. After the refusal nobody is tried until a has left."""
    for together in (True, False):
        a, b = request("a", 10, max_tokens=50), request("b", 10, max_tokens=50)
        h = harness(SgLang(), 110, enable_prefix_caching=False)
        table = Table(h, a, b)
        h.add(a)
        if together:
            h.add(b)
            assert table.step() == [("a", 0, 10)]
            assert [[name for name, _, _ in rows] for rows in table.run(49)] == [["a"]] * 49
        else:
            assert table.step() == [("a", 0, 10)]
            h.add(b)
        assert table.step() == [("b", 0, 10)]
        h.run()
        assert h.scheduler.counters.num_preemptions == (not together), "the guess was too low: 59 + 58 tokens"


def test_retraction() -> None:
    """Worked by hand: pool 20, nothing is guessed; a (4 tokens, 10 to generate), a step later b (6, 8).

    Five decode steps fill the pool with 9 + 11 tokens. In step 8 both have 6 tokens out, so b with the longer prompt
    goes. The ratio rises to (6 + 20) / 10, at most 1: b's 12 + 2 + 1 do not fit beside a, and it waits for a's end.
    """
    a, b = request("a", 4, max_tokens=10), request("b", 6, max_tokens=8)
    h = harness(SgLang(init_new_token_ratio=0.0), 20, enable_prefix_caching=False)
    table = Table(h, a, b)
    h.add(a)
    first = table.step()
    h.add(b)
    assert [first, *table.finish()] == [
        [("a", 0, 4)],
        [("b", 0, 6)],
        *([("a", 4 + i, 1), ("b", 6 + i, 1)] for i in range(5)),
        [("a", 9, 1)],
        [("a", 10, 1)],
        [("a", 11, 1)],
        [("a", 12, 1)],
        [("b", 0, 12)],
        [("b", 12, 1)],
    ]
    assert h.scheduler.counters.num_preemptions == 1


def test_the_ratio_falls_and_rises() -> None:
    """From 0.7 to 0.098 in 600 decode steps, no further; then to what was generated and 20 steps more."""
    ratio = NewTokenRatio(initial=0.7, least=0.098, steps=600)
    for _ in range(300):
        ratio.decay()
    assert ratio.value == pytest.approx(0.399)
    for _ in range(400):
        ratio.decay()
    assert ratio.value == 0.098
    running = [Sequence(request(name, 5), i, 100) for i, name in enumerate("ab")]
    running[0].tokens += [1] * 30
    ratio.raise_for(running)
    assert ratio.value == pytest.approx((30 + 2 * 20) / 200)
    ratio.raise_for([Sequence(request("c", 5), 2, 3)])
    assert ratio.value == 1.0


def test_longest_prefix_first() -> None:
    """What is in the cache goes first; with first come first served it does not."""
    warm = request("warm", 40, max_tokens=1)
    x, y = request("x", 50, max_tokens=1), request("y", (*warm.prompt, 1, 2, 3, 4, 5), max_tokens=1)
    for policy, order in (("lpm", [("y", 40, 5), ("x", 0, 50)]), ("fcfs", [("x", 0, 50), ("y", 40, 5)])):
        h = harness(SgLang(schedule_policy=policy), 300)  # type: ignore[arg-type]
        table = Table(h, warm, x, y)
        h.add(warm)
        h.run()
        h.add(x, y)
        [table.read(plan) for plan in h.plans]
        assert table.step() == order
        h.run()


def test_one_of_several_that_share_an_uncached_prefix_goes_first() -> None:
    """u and v share 40 tokens that nobody has computed: v waits behind w, and then finds them."""
    u = request("u", 45, max_tokens=1)
    v = request("v", (*u.prompt[:40], 1, 2, 3, 4, 5), max_tokens=1)
    w = request("w", 10, max_tokens=1)
    h = harness(SgLang(chunked_prefill_size=55), 300)
    h.add(u, v, w)
    assert Table(h, u, v, w).finish() == [[("u", 0, 45), ("w", 0, 10)], [("v", 40, 5)]]


@pytest.mark.parametrize(("num_waiting", "first"), [(128, "y"), (129, "0")])
def test_a_long_queue_is_not_sorted(num_waiting: int, first: str) -> None:
    """With more than 128 waiting it is first come, first served."""
    warm = request("warm", 40, max_tokens=1)
    y = request("y", (*warm.prompt, 1), max_tokens=1)
    others = [request(str(i), (i, i + 1), max_tokens=1) for i in range(num_waiting - 1)]
    h = harness(SgLang(), 1000)
    table = Table(h, warm, y, *others)
    h.add(warm)
    h.run()
    [table.read(plan) for plan in h.plans]
    h.add(*others, y)
    assert table.step()[0][0] == first


def test_steps_are_of_prompts_or_of_decodes() -> None:
    """Unless mixed, no step has both."""
    sampled: dict[int, bool] = {}

    def watch(h: Harness, plan: StepPlan) -> None:
        for opened in plan.opened:
            sampled[opened.row] = False
        kinds = {sampled[chunk.row] for chunk in plan.chunks}
        assert len(kinds) < 2, "prompts and decodes in one step"
        for chunk in plan.chunks:
            sampled[chunk.row] = sampled[chunk.row] or chunk.sample

    changes = {"block_size": 1, "max_num_batched_tokens": 24}
    preset = SgLang(init_new_token_ratio=0.0, chunked_prefill_size=16)
    run = run_traces(60, lambda seed: preset, changes=changes, watch=watch)
    assert sum(h.scheduler.counters.num_preemptions for h in run) > 0
    mixed = SgLang(init_new_token_ratio=0.0, chunked_prefill_size=16, enable_mixed_chunk=True)
    run_traces(60, lambda seed: mixed, changes={"block_size": 4, "max_num_batched_tokens": 24})


def test_everything_guessed_in_full_never_retracts() -> None:
    """With a ratio that stays at 1 and whole prompts every admission is a reservation."""
    preset = SgLang(init_new_token_ratio=1.0, min_new_token_ratio_factor=1.0)
    changes = {"block_size": 1, "max_num_batched_tokens": 200, "num_blocks": 100}
    for seed in range(60):
        h = run_trace(seed, preset, changes=changes, depths=(1,))
        assert h.scheduler.counters.num_preemptions == 0


def test_knobs_are_checked() -> None:
    """An impossible value is named, and a chunk below a page too."""
    with pytest.raises(ValueError, match="schedule_policy must be 'lpm' or 'fcfs', got 'dfs-weight'"):
        SgLang(schedule_policy="dfs-weight")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunked_prefill_size must be at least 1, got -1"):
        SgLang(chunked_prefill_size=-1)
    with pytest.raises(ValueError, match="blocks of 16 tokens, but only 8"):
        SgLang(chunked_prefill_size=8).policy(config())
