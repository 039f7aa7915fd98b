"""Runs of a preset: a hand-worked table of what each step computed, and random traces with what must hold always."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from hopon.core.config import SchedulerConfig
from hopon.core.plan import StepPlan
from hopon.core.policy.preset import Preset
from hopon.core.types import FinishReason, Request, SamplingParams
from tests.core.harness import STOP_TOKEN, Harness, config

Row = tuple[str, int, int]


class Table:
    """Names the rows of a harness's plans. Requests need different prompts."""

    def __init__(self, harness: Harness, *requests: Request) -> None:
        self.harness = harness
        self._names = {request.prompt: request.request_id for request in requests}
        self._rows: dict[int, str] = {}

    def know(self, request: Request) -> Request:
        """One more request."""
        self._names[request.prompt] = request.request_id
        return request

    def step(self) -> list[Row]:
        """(request, start, count) of each chunk of one step."""
        return self.read(self.harness.step())

    def read(self, plan: StepPlan) -> list[Row]:
        """The same of a plan; plans must be read in order."""
        for opened in plan.opened:
            self._rows[opened.row] = self._names[opened.prompt]
        return [(self._rows[chunk.row], chunk.start, chunk.count) for chunk in plan.chunks]

    def run(self, num_steps: int) -> list[list[Row]]:
        """So many steps."""
        return [self.step() for _ in range(num_steps)]

    def finish(self) -> list[list[Row]]:
        """All steps that compute anything, to the end."""
        steps = []
        while self.harness.scheduler.has_work:
            steps.append(self.step())
        return [rows for rows in steps if rows]


def harness(preset: Preset, num_blocks: int, **changes: object) -> Harness:
    """A scheduler under a preset, with one token per block unless told otherwise."""
    settings = config(num_blocks, **({"block_size": 1} | changes))
    return Harness.make(settings, policy=preset.policy(settings))


def random_config(rng: random.Random, **changes: object) -> SchedulerConfig:
    """Small and tight."""
    seats, budget = rng.choice([1, 2, 5, 16]), rng.choice([1, 7, 32, 200])
    settings: dict[str, object] = {
        "num_blocks": rng.choice([3, 12, 40, 100]),
        "block_size": rng.choice([1, 1, 4, 16]),
        "max_model_len": rng.choice([24, 80]),
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, budget),
        "enable_prefix_caching": rng.random() < 0.6,
    }
    return SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]


def random_request(rng: random.Random, name: str, settings: SchedulerConfig) -> Request:
    """Few different tokens, so that prefixes are shared; some stop early."""
    length = rng.choice([1, rng.randint(1, 20), rng.randint(1, settings.max_model_len + 3)])
    return Request(
        request_id=name,
        prompt=tuple(rng.randrange(2) for _ in range(length)),
        params=SamplingParams(max_tokens=rng.choice([None, 1, rng.randint(1, 40)])),
        seed=1,
        stop_token_ids=(STOP_TOKEN,) if rng.random() < 0.6 else (),
    )


def run_trace(
    seed: int,
    preset: Preset,
    *,
    changes: Mapping[str, object] | None = None,
    aborts: bool = True,
    depths: tuple[int, ...] = (1, 1, 2),
    watch: Callable[[Harness, StepPlan], None] | None = None,
) -> Harness:
    """Random requests at random times, to the end: everybody ends exactly once and everything comes back.

    Args:
        seed: of the trace.
        preset: who plans.
        changes: fields of the configuration that are not left to chance.
        aborts: some requests are aborted.
        depths: steps in flight, one of these.
        watch: sees each plan after its step.
    """
    rng = random.Random(seed)
    settings = random_config(rng, **(changes or {}))
    h = Harness.make(settings, depth=rng.choice(depths), seed=seed, policy=preset.policy(settings))
    names = [str(i) for i in range(rng.randint(1, 20))]
    upcoming = list(names)
    while upcoming or h.scheduler.has_work:
        while upcoming and (rng.random() < 0.4 or not h.scheduler.has_work):
            h.add(random_request(rng, upcoming.pop(0), settings))
        if aborts and rng.random() < 0.03:
            h.abort(rng.choice(names))
        plan = h.step()
        if watch is not None:
            watch(h, plan)
        assert len(h.plans) < 20_000, "this trace does not end"
    assert sorted(h.finished, key=int) == names, "a request was lost"
    assert h.scheduler.pool.num_free == h.scheduler.pool.num_blocks, "blocks were lost"
    assert len(h.scheduler._free_rows) == settings.max_num_seqs, "seats were lost"
    assert not h.rows, "rows are open after the end"
    for name, delta in h.finished.items():
        if delta.finish in (FinishReason.STOP, FinishReason.LENGTH):
            assert h.outputs[name], "an empty success"
    return h


def run_traces(count: int, make: Callable[[int], Preset], **keywords: object) -> list[Harness]:
    """Many of them; says which one fails."""
    harnesses = []
    for seed in range(count):
        try:
            harnesses.append(run_trace(seed, make(seed), **keywords))  # type: ignore[arg-type]
        except AssertionError as error:
            raise AssertionError(f"trace {seed}: {error}") from error
    return harnesses
