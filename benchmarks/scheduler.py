"""What the scheduler takes per step: plan and commit of a full house that decodes, by queue and by context.

``python -m benchmarks.scheduler`` prints a line per case, in microseconds: medians over steps. No model runs; the
results are made of integers.
"""

from __future__ import annotations

import gc
import time
from statistics import median

from hopon.core.config import SchedulerConfig
from hopon.core.plan import RowResult, StepResult
from hopon.core.scheduler import Scheduler
from hopon.core.types import Request, SamplingParams

STEPS = 200


def full_house(num_running: int, num_waiting: int, context: int) -> Scheduler:
    """A scheduler whose rows are all taken by sequences that decode at ``context``, and others in line."""
    config = SchedulerConfig(
        num_blocks=num_running * (context + 2 * STEPS) // 16 + num_running,
        max_model_len=context + 4 * STEPS,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, num_running),
    )
    scheduler = Scheduler(config)
    params = SamplingParams(max_tokens=3 * STEPS)
    for i in range(num_running + num_waiting):
        prompt = tuple(range(i, i + context))
        request = Request(request_id=str(i), prompt=prompt, params=params, seed=i, stop_token_ids=(0,), arrival=0.0)
        scheduler.add(request, 0.0)
    while scheduler.num_running < num_running or any(s.num_remaining > 1 for s in scheduler._running):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> tuple[float, float]:
    """One step; seconds of plan and of commit."""
    begin = time.perf_counter()
    plan = scheduler.plan(0.0)
    planned = time.perf_counter()
    rows = tuple(RowResult(row=chunk.row, tokens=(7,) if chunk.sample else ()) for chunk in plan.chunks)
    result = StepResult(rows)
    computed = time.perf_counter()
    scheduler.commit(plan, result, 0.0)
    return planned - begin, time.perf_counter() - computed


def main() -> None:
    """Print the table."""
    print("running  waiting  context |  plan us  commit us   both us")
    for num_running, num_waiting, context in (
        (32, 0, 200),
        (256, 0, 200),
        (256, 1000, 200),
        (256, 10000, 200),
        (256, 1000, 2000),
    ):
        scheduler = full_house(num_running, num_waiting, context)
        gc.collect()
        gc.freeze()
        times = [step(scheduler) for _ in range(STEPS)]
        plan, commit, both = (1e6 * median(column) for column in zip(*((p, c, p + c) for p, c in times), strict=True))
        print(f"{num_running:7} {num_waiting:8} {context:8} | {plan:8.0f} {commit:10.0f} {both:9.0f}", flush=True)


if __name__ == "__main__":
    main()
