"""The fast mode: runs of pure decode steps in which nothing can happen are merged into one entry of the heap.

While nobody waits, nobody can end, memory suffices and nothing arrives, a step is the step before with a longer
context. Each merged step is still timed by the cost model, so that the times are those of the exact mode. What is lost:
policies do not hear of merged steps (ratios that decay by the step, turns), blocks are taken in another order, and KV
memory is sampled once per run of steps. The benchmark prints the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from hopon.core.plan import StepPlan
from hopon.core.scheduler import Scheduler
from hopon.sim.tokens import SimulatedDevice
from hopon.tracing import StepFeatures


class LeapingScheduler(Scheduler):
    """A scheduler that can repeat its last step many times at once, for a device that keeps no history."""

    def steps_before_news(self, plan: StepPlan, device: SimulatedDevice) -> int:
        """How often ``plan``, just committed, can be repeated before anybody may end or need memory that is not free.

        0 unless it was a plain decode step of everybody.
        """
        num_running = len(self._running)
        if self._waiting or not num_running or len(plan.chunks) != num_running:
            return 0
        if plan.padding or self._closing or self._in_flight or self._outbox or self._held:
            return 0
        steps = max(0, self.pool.num_free // num_running - 1) * self.config.block_size
        for sequence in self._running:
            known = len(sequence.tokens)
            if known - sequence.num_computed != 1 or sequence.row is None:
                return 0
            to_limit = sequence.max_output - (known - sequence.num_prompt)
            steps = int(min(steps, to_limit - 1, device.steps_to_end(sequence.row, known)))
            if steps <= 0:
                return 0
        return steps

    def leap(self, count: int, device: SimulatedDevice) -> list[str]:
        """Everybody decodes ``count`` tokens, as :meth:`steps_before_news` allows. Returns whose they are."""
        size = self.config.block_size
        names = []
        for sequence in self._running:
            assert sequence.row is not None, "only a sequence with a row computes"
            names.append(sequence.request.request_id)
            sequence.tokens += [device.token(sequence.row)] * count
            end = sequence.num_computed = sequence.num_computed + count
            sequence.peak_computed = max(sequence.peak_computed, end)
            missing = self._blocks_for(end) - len(sequence.blocks)
            if missing > 0:
                sequence.blocks += self.pool.allocate(missing)
            if self.config.enable_prefix_caching and end >= (sequence.num_published + 1) * size:
                self._publish(sequence, end)
        self._step += count
        self.counters.num_steps += count
        self.counters.num_scheduled_tokens += count * len(names)
        self.counters.num_generated_tokens += count * len(names)
        return names


class Timed(Protocol):
    """What times a merged step."""

    def finish(self, plan: StepPlan, step: StepFeatures, start: float) -> float:
        """When it is done."""


def merge(pace: Timed, plan: StepPlan, step: StepFeatures, start: float, limit: int, until: float) -> Sequence[float]:
    """Ends of the steps that follow a decode step, at most ``limit`` of them; none starts at ``until`` or later."""
    times: list[float] = []
    batch, context = step.num_decodes, step.decode_context
    while len(times) < limit and start < until:
        context += batch
        following = StepFeatures(num_decodes=batch, decode_context=context, num_logits=batch)
        start = pace.finish(plan, following, start)
        times.append(start)
    assert not times or times[-1] < inf, "a step without an end"
    return times
