"""The simulator as a target: the engine's own scheduler on a virtual clock, with step times from a cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from hopon.capacity.load import Load
from hopon.capacity.promise import Promise
from hopon.capacity.search import Window
from hopon.capacity.window import fold
from hopon.core.config import SchedulerConfig
from hopon.core.policy.preset import Policy
from hopon.sim.cluster import router
from hopon.sim.cost import Cost, Paced
from hopon.sim.run import simulate


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A deployment that does not exist.

    Args:
        load: what is offered.
        promise: what was promised.
        config: settings of each scheduler.
        policy: makes fresh parts for each of them.
        cost: how long a step takes.
        replicas: how many engines.
        router: its name; with several replicas.
        overhead: seconds from the client to the engine and back with the first token, by which every TTFT and E2E is
            longer than in the engine.
        paces: factors of step times, one of which is drawn for every window: no machine is as fast in one minute as in
            the next, and a limit is where the slow ones keep the promise, too. None for a steady machine.
        fast: merge runs of decode steps.
    """

    load: Load
    promise: Promise
    config: SchedulerConfig
    policy: Callable[[SchedulerConfig], Policy]
    cost: Cost
    replicas: int = 1
    router: str = "least-load"
    overhead: float = 0.0
    paces: tuple[float, ...] = ()
    fast: bool = False

    def settings(self) -> dict[str, Any]:
        """Of each scheduler, by name."""
        return asdict(self.config)

    def measure(self, rate: float, seed: int, seconds: float) -> Window:
        """See :class:`hopon.capacity.search.Target`."""
        workload = self.load.draw(rate, seconds, seed)
        cost = self.cost
        if self.paces:
            cost = Paced(cost=cost, factor=Random(f"pace {seed}").choice(self.paces))
        result = simulate(
            workload,
            self.config,
            self.policy,
            cost,
            replicas=self.replicas,
            router=router(self.router) if self.replicas > 1 else None,
            fast=self.fast,
        )
        kinds = [ask.kind for ask in workload]
        records = [
            replace(record, kind=kinds[int(record.request_id)], arrival=record.arrival - self.overhead)
            for record in result.records
        ]
        totals = result.totals
        useful = totals.scheduled_tokens - totals.recomputed_tokens
        num_tokens = self.config.num_blocks * self.config.block_size * self.replicas
        return fold(
            records,
            self.promise,
            rate=rate,
            seed=seed,
            seconds=seconds,
            recomputed=totals.recomputed_tokens / useful if useful else 0.0,
            figures={
                "running": totals.mean_batch,
                "waiting": sum(record.waiting or 0.0 for record in records) / seconds,  # Little's law
                "seats": self.config.max_num_seqs,
                "kv_usage": totals.kv_reserved / num_tokens,
                "kv_peak": totals.kv_peak / num_tokens,
                "preemptions": totals.preemptions,
            },
        )
