"""The only loop in production: inbox -> plan -> submit -> commit -> emit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import isinf
from typing import Protocol

from hopon.core.clock import Clock, WallClock
from hopon.core.plan import Executor, StepHandle, StepPlan, StepResult
from hopon.core.record import record
from hopon.core.scheduler import Counters, Scheduler
from hopon.core.types import Delta, Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request, in whatever phase it is; it ends with ``FinishReason.ABORT``. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the loop after the current step; unfinished requests end with ``FinishReason.ABORT``."""


@dataclass(frozen=True, slots=True)
class CloseInput:
    """No more requests will come."""


Command = Request | Abort | CloseInput | Shutdown


class Inbox(Protocol):
    """Where commands come from."""

    def drain(self, timeout: float | None) -> Sequence[Command]:
        """Everything that has arrived. When nothing has, wait up to ``timeout`` seconds (None: as long as it takes)."""


@record(kw_only=True)
class EngineStats:
    """Gauges and monotonic counters after a step; plain numbers, cheap to send."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_steps: int
    num_scheduled_tokens: int  # all steps together
    num_padding_tokens: int
    num_generated_tokens: int
    num_prompt_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_moved_blocks: int
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found


_COUNTERS = tuple(counter.name for counter in fields(Counters))

Emit = Callable[[Sequence[Delta], EngineStats], None]
"""Called once per iteration that has news, with the news of all requests."""


class Engine:
    """Drives a scheduler and an executor.

    Args:
        scheduler: decides.
        executor: computes.
        clock: what time it is.
        depth: submitted steps that may be unfinished when the next one is planned. On a CPU 1 is best: planning beside
            busy compute threads takes time from them.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, clock: Clock | None = None, depth: int = 1) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock or WallClock()
        self.depth = depth
        self._submitted: deque[tuple[StepPlan, StepHandle]] = deque()
        self._wake_at: float | None = None

    def run(self, inbox: Inbox, emit: Emit) -> None:
        """Serve until a Shutdown arrives. What the executor raises is raised."""
        while True:
            commands = inbox.drain(self.patience())
            news = self.step(commands)
            if news or self.scheduler.has_work:
                emit(news, self.stats())
            if any(isinstance(command, Shutdown) for command in commands):
                return

    def patience(self) -> float | None:
        """Seconds the driver may wait for commands before the next step: None when there is nothing to do."""
        if self._wake_at is not None and not self._submitted:
            return None if isinf(self._wake_at) else max(0.0, self._wake_at - self.clock.now())
        return 0.0 if self.scheduler.has_work else None

    def step(self, commands: Sequence[Command] = ()) -> list[Delta]:
        """One iteration: take commands in, plan and submit one step, commit the oldest submitted one."""
        scheduler = self.scheduler
        now = self.clock.now()
        for command in commands:
            match command:
                case Request():
                    scheduler.add(command, now)
                case Abort():
                    scheduler.abort(command.request_id, now)
                case CloseInput():
                    scheduler.close_input()
                case Shutdown():
                    scheduler.abort_all(now)
        plan = scheduler.plan(now)
        self._wake_at = plan.wake_at
        if not plan.is_empty:
            self._submitted.append((plan, self.executor.submit(plan)))
        if self._submitted and (plan.is_empty or len(self._submitted) >= self.depth):
            plan, handle = self._submitted.popleft()
            result = handle.result()
        else:
            result = StepResult()
            if self._submitted:  # the pipeline is filling: nothing to commit yet
                plan = StepPlan(step=-1)
        return scheduler.commit(plan, result, self.clock.now())

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        scheduler = self.scheduler
        counters = scheduler.counters
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=scheduler.pool.num_blocks,
            num_used_blocks=scheduler.pool.num_used,
            **{name: getattr(counters, name) for name in _COUNTERS},
        )
