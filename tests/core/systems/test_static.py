"""Static groups, the impatient variant and the padded pipeline, pass by pass."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from hopon.core.policy.preset import Preset
from hopon.core.policy.systems.static import HfPipeline, Static, StaticImpatient
from hopon.core.types import FinishReason
from tests.core.harness import Harness, config, request
from tests.core.systems.drive import Driver, random_trace, run_trace, schedule
from tests.core.test_random_traces import random_config


def make(preset: Preset, num_blocks: int = 100, **changes: object) -> Harness:
    settings = config(num_blocks, **({"block_size": 1, "max_num_seqs": 4, "enable_prefix_caching": False} | changes))
    return Harness.make(settings, policy=preset.policy(settings))


def test_a_full_group_goes_and_nobody_joins() -> None:
    """Three go together; the fourth waits for its own group, which the closed input makes partial."""
    h = make(Static(group_size=3))
    asked = a, b, c, d = request("a", 2, 2), request("b", 3, 4), request("c", 1, 1), request("d", 2, 1)
    h.add(a, b)
    assert h.step().wake_at == inf
    h.add(c, d)
    h.until(lambda: len(h.finished) == 3)
    assert h.step().wake_at == inf
    h.scheduler.close_input()
    h.run()
    assert schedule(h, *asked) == [
        [("a", 0, 2), ("b", 0, 3), ("c", 0, 1)],
        [("a", 2, 1), ("b", 3, 1)],
        [("b", 4, 1)],
        [("b", 5, 1)],
        [("d", 0, 2)],
    ]


def test_a_batch_answers_together_and_streams_when_told() -> None:
    """Delivery changes when news is heard, never the plans."""
    plans = []
    for delivery, times in (("batch", {"a": 4.0, "b": 4.0}), ("stream", {"a": 2.0, "b": 4.0})):
        h = make(Static(group_size=2, delivery=delivery))  # type: ignore[arg-type]
        h.add(request("a", 2, 2), request("b", 3, 4))
        h.run()
        assert {name: delta.time for name, delta in h.finished.items()} == times
        plans.append(h.plans)
    assert plans[0] == plans[1]


def test_a_partial_group_goes_when_its_oldest_has_waited() -> None:
    """Ten seconds after the first arrival, not after the last."""
    h = make(Static(group_size=3, max_wait=10.0))
    h.add(request("a", 2, 1))
    assert h.step().wake_at == 10.0
    h.now = 5.0
    h.add(request("b", 2, 1, arrival=5.0))
    assert h.step().wake_at == 10.0
    h.now = 9.0
    assert len(h.step().chunks) == 2


def test_a_group_is_full_when_memory_is() -> None:
    """Reservations 6 + 5 do not fit into 10, so the first goes alone; 5 + 2 do, but are no full group."""
    h = make(Static(group_size=3), 10)
    asked = a, b, c = request("a", 3, 3), request("b", 2, 3), request("c", 1, 1)
    h.add(a, b, c)
    h.until(lambda: "a" in h.finished)
    assert h.step().wake_at == inf
    h.scheduler.close_input()
    h.run()
    assert schedule(h, *asked) == [
        [("a", 0, 3)],
        [("a", 3, 1)],
        [("a", 4, 1)],
        [("b", 0, 2), ("c", 0, 1)],
        [("b", 2, 1)],
        [("b", 3, 1)],
    ]


def test_prompts_beyond_the_budget_take_several_passes() -> None:
    """With a budget of 4 the group's 8 prompt tokens take two passes, and nobody decodes before they are done."""
    h = make(Static(group_size=3), max_num_batched_tokens=4)
    asked = request("a", 3, 2), request("b", 3, 2), request("c", 2, 1)
    h.add(*asked)
    h.run()
    assert schedule(h, *asked) == [
        [("a", 0, 3), ("b", 0, 1)],
        [("b", 1, 2), ("c", 0, 2)],
        [("a", 3, 1), ("b", 3, 1)],
    ]


def test_a_member_that_leaves_before_it_starts_holds_nobody_up() -> None:
    """The group goes on without it."""
    h = make(Static(group_size=3), max_num_batched_tokens=4)
    asked = request("a", 3, 2), request("b", 3, 2), request("c", 2, 1)
    h.add(*asked)
    h.step()
    h.abort("c")
    h.run()
    assert schedule(h, *asked)[1:] == [[("b", 1, 2)], [("a", 3, 1), ("b", 3, 1)]]


def test_the_impatient_takes_what_waits() -> None:
    """Two of four seats go at once; who comes later waits until both have left."""
    h = make(StaticImpatient())
    asked = a, b, c, d = request("a", 2, 1), request("b", 3, 3), request("c", 1, 2), request("d", 2, 1)
    h.add(a, b)
    h.step()
    h.add(c, d)
    h.run()
    assert schedule(h, *asked) == [
        [("a", 0, 2), ("b", 0, 3)],
        [("b", 3, 1)],
        [("b", 4, 1)],
        [("c", 0, 1), ("d", 0, 2)],
        [("c", 1, 1)],
    ]


def test_a_padded_batch_is_a_rectangle() -> None:
    """Prompts of 2 and 4 and a run's maximum of 3: two rows of 4 + 2 positions, 12 in all, answered at the end."""
    h = make(HfPipeline(group_size=2, run_max_tokens=3))
    asked = request("a", 2, 1), request("b", 4, 2)
    h.add(*asked)
    h.run()
    assert schedule(h, *asked) == [[("a", 0, 2), ("b", 0, 4)], [("b", 4, 1)], []]
    assert [plan.padding for plan in h.plans if plan.padding] == [2, 1, 2]
    assert {delta.time for delta in h.finished.values()} == {3.0}


def test_the_next_padded_batch_waits_for_the_maximum() -> None:
    """Passes that nobody needs hold the next group up as real ones do."""
    h = make(HfPipeline(group_size=1, run_max_tokens=3))
    asked = request("a", 2, 1), request("b", 4, 3)
    h.add(*asked)
    h.run()
    assert schedule(h, *asked) == [[("a", 0, 2)], [], [], [("b", 0, 4)], [("b", 4, 1)], [("b", 5, 1)]]


def test_more_than_the_runs_maximum_is_refused() -> None:
    """With both numbers; the others are served."""
    h = make(HfPipeline(group_size=1, run_max_tokens=3))
    h.add(request("a", 2, 4), request("b", 2, 3))
    h.run()
    assert h.reason("a") is FinishReason.REFUSED
    assert "4 output tokens" in h.finished["a"].message
    assert "run_max_tokens 3" in h.finished["a"].message
    assert h.reason("b") is FinishReason.LENGTH


def test_padded_batches_are_rectangles(effort: Callable[[int, int], int]) -> None:
    """Random runs without aborts: rows computed are, batch by batch, members x (longest prompt + maximum - 1)."""
    for seed in range(effort(30, 500)):
        rng = random.Random(seed)
        settings = random_config(rng)
        policy = HfPipeline(run_max_tokens=settings.max_model_len, max_wait=9.0).policy(settings)
        driver = Driver.make(settings, seed=seed, policy=policy)
        assert isinstance(driver, Driver)
        trace = random_trace(rng, settings)
        trace.aborts.clear()
        driver.play(trace).check_end(trace)
        batches: dict[float, list[int]] = defaultdict(list)
        for _, one in trace.arrivals:
            end = driver.finished[one.request_id]
            if end.finish is not FinishReason.REFUSED:
                batches[end.time].append(len(one.prompt))
        counters = driver.scheduler.counters
        computed = counters.num_scheduled_tokens + counters.num_padding_tokens + counters.prefix_cache_hits
        assert computed == sum(
            len(prompts) * (max(prompts) + settings.max_model_len - 1) for prompts in batches.values()
        ), f"trace {seed}"


@pytest.mark.parametrize("name", ["static", "static-impatient", "hf-pipeline", "dynamic"])
def test_batches_do_not_overlap(name: str, effort: Callable[[int, int], int]) -> None:
    """Random traces, one step in flight: nobody is preempted, and nobody starts beside somebody who decodes."""
    for seed in range(effort(60, 500)):
        driver = run_trace(name, seed)
        assert driver.scheduler.counters.num_preemptions == 0
        if driver.depth > 1:
            continue
        known: dict[int, int] = {}  # tokens that a row came with
        decoding: set[int] = set()
        for plan in driver.plans:
            decoding -= set(plan.closed)
            assert not (plan.opened and decoding), f"trace {seed}: somebody joins a batch that decodes"
            known |= {opened.row: len(opened.prompt) + len(opened.output) for opened in plan.opened}
            decoding |= {chunk.row for chunk in plan.chunks if chunk.start >= known[chunk.row]}


def test_impossible_values_name_the_numbers() -> None:
    """A group that has no seats, a negative wait, no maximum of the run."""
    settings = config(max_num_seqs=4)
    with pytest.raises(ValueError, match=r"group_size .*max_num_seqs 4.*got 5"):
        Static(group_size=5).policy(settings)
    with pytest.raises(ValueError, match=r"max_wait .*-1"):
        Static(max_wait=-1.0)
    with pytest.raises(ValueError, match=r"group_size .*-1"):
        Static(group_size=-1)
    with pytest.raises(ValueError, match=r"delivery .*'soon'"):
        Static(delivery="soon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="run_max_tokens"):
        HfPipeline().policy(settings)


def test_what_a_server_must_not_use_says_why() -> None:
    """A pipeline never; static only with a limit to its patience."""
    assert "run" in HfPipeline(run_max_tokens=5).why_not_serve
    assert "max_wait" in Static().why_not_serve
    assert not replace(Static(), max_wait=1.0).why_not_serve
