"""One contender on the real engine, in wall-clock time.

Arrivals are open loop: a request is sent when its time has come, whatever became of those before. Its prompt is made
up, and its output has the length that the workload says, whatever the model would like (``ignore_eos``). What is
counted, and how, is the simulator's: the same meter watches the real engine's steps.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hopon.compare.contender import Plan
from hopon.core.clock import Clock, WallClock
from hopon.core.engine import CloseInput, Command, Engine, EngineStats, Shutdown
from hopon.core.plan import Deployment, Executor, Report, StepHandle, StepPlan
from hopon.core.policy.presets import policy_of
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, Request, SamplingParams
from hopon.sim.result import Meter, Result
from hopon.sim.timeline import Timeline
from hopon.tracing import StepRecord, TracedExecutor
from hopon.workload.ask import Ask, Workload


def make_request(ask: Ask, vocab_size: int, origin: float) -> Request:
    """A request of the forced length; ``origin`` is when the workload begins on the driver's clock."""
    return Request(
        request_id=str(ask.number),
        prompt=ask.prompt(vocab_size),
        params=SamplingParams(temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True),
        seed=ask.number,
        arrival=origin + ask.arrival,
        priority=ask.priority,
    )


class OpenLoop:
    """An inbox that delivers requests when their time has come, closes the input behind the last, and shuts down when
    nothing is left to do.

    Args:
        requests: in order of arrival.
        clock: what their arrivals refer to.
        has_work: of the engine.
    """

    def __init__(self, requests: Sequence[Request], clock: Clock, scheduler: Scheduler) -> None:
        self._upcoming = deque(requests)
        self._clock = clock
        self._scheduler = scheduler

    def drain(self, timeout: float | None) -> list[Command]:
        """See :class:`hopon.core.engine.Inbox`. Raises ValueError when requests wait for what never comes."""
        commands = self._due()
        if not commands and self._upcoming:
            pause = self._upcoming[0].arrival - self._clock.now()
            self._sleep(pause if timeout is None else min(pause, timeout))
            return self._due()
        if commands or timeout is not None:
            if not commands and timeout:
                self._sleep(timeout)
            return commands
        if self._scheduler.has_work:
            raise ValueError(
                f"{self._scheduler.num_running + self._scheduler.num_waiting} requests wait for ever: nothing more "
                f"arrives, and the policy plans nothing until then"
            )
        return [Shutdown()]

    def _due(self) -> list[Command]:
        now, due = self._clock.now(), list[Command]()
        while self._upcoming and self._upcoming[0].arrival <= now:
            due.append(self._upcoming.popleft())
            if not self._upcoming:
                due.append(CloseInput())
        return due

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


class MeteredExecutor:
    """Passes plans on and lets a meter see each step with the time it took.

    Args:
        inner: computes.
        scheduler: what the meter reads.
        clock: measures.
        meter: counts.
    """

    def __init__(self, inner: Executor, scheduler: Scheduler, clock: Clock, meter: Meter) -> None:
        self.scheduler = scheduler
        self.index = 0
        self.num_rows = 0  # tokens that went through the model, padding included
        self._meter = meter
        self._traced = TracedExecutor(inner, clock, self._count)
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step."""
        self._plans.append(plan)
        return self._traced.submit(plan)

    def close(self) -> None:
        """Close the inner one."""
        self._traced.close()

    def _count(self, record: StepRecord) -> None:
        self.num_rows += record.features.num_tokens
        self._meter.stepped(self, self._plans.popleft(), record.features, record.start, record.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one contender did.

    Args:
        label: the contender's.
        result: totals, records and summary.
        outputs: tokens of each request.
        timeline: every step, where it was asked for.
    """

    label: str
    result: Result
    outputs: Mapping[str, tuple[int, ...]]
    timeline: dict[str, Any] | None = None

    @property
    def digest(self) -> str:
        """Of all outputs."""
        return hashlib.sha256(repr(sorted(self.outputs.items())).encode()).hexdigest()


def run(
    plan: Plan,
    deployment: Deployment,
    workload: Workload,
    vocab_size: int,
    report: Report,
    timeline: Timeline | None = None,
) -> Outcome:
    """Play the workload on a loaded model; ``report`` hears which share of the requests has ended.

    With a timeline every step is noted, too.

    Raises:
        ValueError: the policy refuses the settings, or waits for what never comes.
    """
    config = deployment.config
    assert config == plan.config, f"the executor resolved {config}, planned was {plan.config}"
    _warm_up(deployment)
    clock = WallClock()
    policy = policy_of(plan.options, config)
    block_bytes = float(deployment.summary.get("kv_bytes_per_token", 0)) * config.block_size
    scheduler = Scheduler(config, timeline.watch(policy) if timeline else policy)
    meter = timeline.meter(block_bytes=block_bytes) if timeline else Meter(block_bytes=block_bytes)
    executor = MeteredExecutor(deployment.executor, scheduler, clock, meter)
    outputs: dict[str, list[int]] = {}
    ended = 0

    def emit(news: Sequence[Delta], stats: EngineStats) -> None:
        nonlocal ended
        meter.heard(executor, news)
        for delta in news:
            outputs.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish is not None:
                ended += 1
                report(plan.contender.label, ended / len(workload))

    prompts = [make_request(ask, vocab_size, 0.0) for ask in workload]  # made before the clock starts
    gc.collect()
    origin = clock.now()
    requests = [replace(request, arrival=origin + request.arrival) for request in prompts]
    for request in requests:
        meter.sent(executor, request)
    Engine(scheduler, executor, clock=clock).run(OpenLoop(requests, clock, scheduler), emit)
    meter.close([executor])
    planned = meter.totals.scheduled_tokens + meter.totals.padding_tokens
    assert executor.num_rows == planned, f"{executor.num_rows} rows were computed, {planned} were planned"
    about = {
        "policy": plan.contender.policy,
        "knobs": dict(plan.options.policy_knobs),
        "delivery": scheduler.policy.delivery,
        "settings": asdict(config),
    }
    result = Result.of(about, meter, None)
    return Outcome(
        label=plan.contender.label,
        result=result,
        outputs={name: tuple(tokens) for name, tokens in outputs.items()},
        timeline=timeline.content(result, origin) if timeline else None,
    )


def _warm_up(deployment: Deployment) -> None:
    """A short request, so that nobody's first pass is the executor's first."""
    config = deployment.config
    scheduler = Scheduler(config)
    prompt = (0,) * min(16, config.max_model_len - 1)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    engine = Engine(scheduler, deployment.executor)
    engine.step([Request(request_id="warm-up", prompt=prompt, params=params, seed=0)])
    while scheduler.has_work:
        engine.step()
