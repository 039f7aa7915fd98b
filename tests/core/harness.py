"""Drives a scheduler with made-up tokens and asserts what must hold in every step, whatever the policy."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hopon.core.config import SchedulerConfig
from hopon.core.plan import RowResult, StepPlan, StepResult
from hopon.core.policy.preset import Policy
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, FinishReason, Request, SamplingParams

STOP_TOKEN = 7


def config(num_blocks: int = 64, **changes: object) -> SchedulerConfig:
    settings: dict[str, object] = {
        "num_blocks": num_blocks,
        "block_size": 16,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]


def request(name: str, prompt: int | tuple[int, ...], max_tokens: int = 8, **changes: object) -> Request:
    """A request with a prompt of its own (or the given one) that never stops by itself."""
    if not isinstance(prompt, tuple):
        # Not ``hash``: it is salted per process, and now and then two prompts would begin alike.
        prompt = tuple(zlib.crc32(f"{name} {place}".encode()) % 1_000_000 + 10 for place in range(prompt))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(**({"request_id": name, "prompt": prompt, "params": params, "seed": 1} | changes))  # type: ignore[arg-type]


@dataclass
class RowState:
    blocks: list[int]
    computed: int | None
    length: int


@dataclass
class Harness:
    """One scheduler, its in-flight steps, and everything it has said.

    The mirror of rows (what an executor would know) is kept from plans alone.
    """

    scheduler: Scheduler
    depth: int = 1
    seed: int = 0
    now: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    finished: dict[str, Delta] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    preemptions: dict[int, int] = field(default_factory=dict)
    rows: dict[int, RowState] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # blocks of closed rows that nobody else has had since
    in_flight: deque[StepPlan] = field(default_factory=deque)

    @classmethod
    def make(cls, settings: SchedulerConfig, *, depth: int = 1, seed: int = 0, policy: Policy | None = None) -> Harness:
        return cls(Scheduler(settings, policy), depth, seed)

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one, self.now)

    def abort(self, name: str) -> None:
        self.scheduler.abort(name, self.now)

    def step(self) -> StepPlan:
        """Plan, check, and commit the oldest step once ``depth`` are in flight."""
        self.now += 1.0
        before = (len(self.finished), len(self.in_flight))
        plan = self.scheduler.plan(self.now)
        self._check_plan(plan)
        self.plans.append(plan)
        self.scheduler.pool.check()
        computes = bool(plan.chunks or plan.padding)
        if computes:
            self.in_flight.append(plan)
        if self.in_flight and (len(self.in_flight) >= self.depth or not computes):
            oldest = self.in_flight.popleft()
            self._hear(self.scheduler.commit(oldest, self._result(oldest), self.now))
        else:
            self._hear(self.scheduler.commit(StepPlan(step=-1), StepResult(), self.now))
        self.scheduler.pool.check()
        progress = computes or plan.closed or (len(self.finished), len(self.in_flight)) != before
        assert progress or plan.wake_at is not None or not self.scheduler.has_work, "a step without progress"
        return plan

    def run(self) -> None:
        """Step until nothing is left to do."""
        self.until(lambda: not self.scheduler.has_work)

    def until(self, done: Callable[[], object], limit: int = 10_000) -> None:
        """Step until something holds."""
        for _ in range(limit):
            if done():
                return
            self.step()
        raise AssertionError(f"not so after {limit} steps")

    def _check_plan(self, plan: StepPlan) -> None:
        settings = self.scheduler.config
        assert plan.num_tokens <= settings.max_num_batched_tokens, "the token budget is exceeded"
        for row in plan.closed:
            self.left.update(self.rows.pop(row).blocks)
        kept = self.left | {move.target for move in plan.moves if move.kind == "from_host"}
        for opened in plan.opened:
            assert 0 <= opened.row < settings.max_num_seqs, "a row outside the seats"
            assert opened.row not in self.rows, "a row is opened while in use"
            self.rows[opened.row] = RowState([], None, len(opened.prompt) + len(opened.output))
        assert len({chunk.row for chunk in plan.chunks}) == len(plan.chunks), "a row computes twice in one step"
        for chunk in plan.chunks:
            state = self.rows[chunk.row]
            state.blocks += chunk.new_blocks
            self.left.difference_update(chunk.new_blocks)
            assert state.computed is None or chunk.start == state.computed, "tokens are skipped or computed twice"
            if state.computed is None and chunk.start % settings.block_size:
                assert state.blocks[chunk.start // settings.block_size] in kept, "a prefix hit inside a block"
            state.computed = chunk.start + chunk.count
            assert state.computed <= state.length, "a token is computed before it exists"
            assert state.computed <= len(state.blocks) * settings.block_size, "a token without a slot"
            assert chunk.sample == (state.computed == state.length), "sampling anywhere but behind the last token"
            state.length += chunk.sample

    def _result(self, plan: StepPlan) -> StepResult:
        rng = random.Random(self.seed * 1_000_003 + plan.step)
        return StepResult(
            tuple(
                RowResult(chunk.row, (rng.choice([STOP_TOKEN, *range(10, 60)]),) if chunk.sample else ())
                for chunk in plan.chunks
            )
        )

    def _hear(self, news: list[Delta]) -> None:
        for delta in news:
            assert delta.request_id not in self.finished, f"{delta.request_id} has news after its end"
            output = self.outputs.setdefault(delta.request_id, [])
            assert not delta.tokens or delta.index == len(output), "a gap or a repeat in the output"
            output += delta.tokens
            if delta.finish is not None:
                self.finished[delta.request_id] = delta

    def reason(self, name: str) -> FinishReason | None:
        return self.finished[name].finish
