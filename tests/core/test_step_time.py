"""Chunks sized by a step's time: the cost is learnt, the target kept, and a prompt always goes on."""

from __future__ import annotations

import random

import pytest

from hopon.core.config import SchedulerConfig
from hopon.core.plan import Chunk, RowResult, StepPlan, StepResult
from hopon.core.policy.step_time import GRAIN, StepCost
from hopon.core.policy.systems.hopon import Hopon
from hopon.core.scheduler import Scheduler
from hopon.core.types import Request, SamplingParams


def true_seconds(plan: StepPlan) -> float:
    """The cost that the policy does not know: a start, decodes, prompt tokens, pairs in attention."""
    total = 0.004
    for chunk in plan.chunks:
        total += 0.0004 if chunk.count == 1 else 0.0003 * chunk.count
        total += 5e-8 * chunk.count * (chunk.start + chunk.count / 2)
    return total


def serve(target: float, seed: int, num_long: int = 12) -> tuple[list[tuple[StepPlan, float]], Scheduler]:
    """Twelve streams and, one after the other, long prompts; the steps and what they took."""
    rng = random.Random(seed)
    config = SchedulerConfig(num_blocks=3000, max_model_len=4000, max_num_seqs=16, max_num_batched_tokens=256)
    scheduler = Scheduler(config, Hopon(step_time_target=target).policy(config))

    def add(name: str, length: int, output: int) -> None:
        prompt = tuple(rng.randrange(1000) for _ in range(length))
        params = SamplingParams(max_tokens=output)
        scheduler.add(Request(request_id=name, prompt=prompt, params=params, seed=0, arrival=0.0), now)

    now, sent = 0.0, 0
    steps: list[tuple[StepPlan, float]] = []
    for i in range(12):
        add(f"stream {i}", 40, 1500)
    while scheduler.has_work:
        if len(steps) % 60 == 20 and sent < num_long:
            add(f"prompt {sent}", 2000, 4)
            sent += 1
        plan = scheduler.plan(now)
        seconds = true_seconds(plan)
        now += seconds
        rows = tuple(RowResult(row=chunk.row, tokens=(1,) if chunk.sample else ()) for chunk in plan.chunks)
        scheduler.commit(plan, StepResult(rows), now)
        steps.append((plan, seconds))
    return steps, scheduler


def test_a_linear_cost_is_learnt() -> None:
    """From noisy steps of many kinds the fit comes within a few percent of the truth."""
    rng, cost = random.Random(1), StepCost()

    def chunks() -> tuple[Chunk, ...]:
        def chunk(row: int, start: int, count: int) -> Chunk:
            return Chunk(row=row, start=start, count=count, num_logits=1, sample=True)

        decodes = [chunk(row, rng.randrange(500), 1) for row in range(rng.randrange(16))]
        return (*decodes, chunk(99, rng.randrange(2000), rng.randrange(16, 256)))

    for _ in range(200):
        some = chunks()
        cost.add(some, true_seconds(StepPlan(step=0, chunks=some)) * rng.uniform(0.97, 1.03))
    for _ in range(50):
        some = chunks()
        assert cost.seconds(some) == pytest.approx(true_seconds(StepPlan(step=0, chunks=some)), rel=0.08)
    start = rng.randrange(1500)
    count = cost.tokens(start, 0.03)
    alone = Chunk(row=0, start=start, count=count, num_logits=1, sample=True)
    assert cost.seconds((alone,)) - cost.weights[0] == pytest.approx(0.03, rel=0.02)


@pytest.mark.parametrize("target", [0.03, 0.05])
def test_steps_keep_to_the_target(target: float) -> None:
    """Once a prompt has been seen, steps with others stay within the target, and use most of it."""
    steps, _ = serve(target, 3)
    seen = sum(1 for plan, _ in steps[:80] if any(chunk.count > 1 for chunk in plan.chunks))
    mixed = [seconds for plan, seconds in steps if any(chunk.count > 1 for chunk in plan.chunks)][seen:]
    assert len(mixed) > 100
    assert max(mixed) < 1.1 * target
    assert sorted(mixed)[len(mixed) // 2] > 0.75 * target
    free, _ = serve(0.0, 3)
    assert max(seconds for _, seconds in free) > 1.5 * target


def test_a_target_that_cannot_be_kept_does_not_stop_prompts() -> None:
    """Below the cost of the decodes alone prompts go on in the smallest chunks, one prompt at a time."""
    steps, scheduler = serve(0.001, 5, num_long=2)
    counts = [chunk.count for plan, _ in steps[60:] for chunk in plan.chunks if chunk.count > 1]
    assert counts
    assert max(counts) == GRAIN
    assert scheduler.counters.num_prompt_tokens == 12 * 40 + 2 * 2000
