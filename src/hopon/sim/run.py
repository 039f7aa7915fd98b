"""One simulation from its parts: a workload, a policy per replica, settings and a cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hopon.core.config import SchedulerConfig
from hopon.core.engine import Abort, CloseInput, Command
from hopon.core.policy.preset import Policy
from hopon.core.scheduler import Scheduler
from hopon.metrics import Limits
from hopon.sim.cost import Cost
from hopon.sim.fast import LeapingScheduler
from hopon.sim.loop import CostPace, Replica, Router, Simulation
from hopon.sim.result import Meter, Result
from hopon.sim.timeline import Timeline
from hopon.sim.tokens import SimulatedDevice
from hopon.workload.ask import Workload


def commands(workload: Workload, aborts: Sequence[tuple[float, str]] = ()) -> Iterator[tuple[float, Command]]:
    """What an engine would be told, in order; the input is closed behind the last request.

    Args:
        workload: the requests; token ids are made when they are needed.
        aborts: (seconds, request id), in any order.
    """
    pending = sorted(aborts, reverse=True)
    for ask in workload:
        while pending and pending[-1][0] < ask.arrival:
            moment, name = pending.pop()
            yield moment, Abort(name)
        yield ask.arrival, ask.request()
    yield workload.asks[-1].arrival, CloseInput()
    for moment, name in reversed(pending):
        yield max(moment, workload.asks[-1].arrival), Abort(name)


def make_replica(
    workload: Workload,
    config: SchedulerConfig,
    policy: Policy,
    cost: Cost,
    *,
    depth: int = 1,
    index: int = 0,
    fast: bool = False,
) -> Replica:
    """A replica whose device knows the workload's true lengths."""
    device = SimulatedDevice(workload.output_lengths.__getitem__)
    scheduler = (LeapingScheduler if fast else Scheduler)(config, policy)
    return Replica(scheduler, device, CostPace(cost), depth=depth, index=index)


def _unwatched(policy: Policy) -> Policy:
    return policy


def simulate(
    workload: Workload,
    config: SchedulerConfig,
    policy: Callable[[SchedulerConfig], Policy],
    cost: Cost,
    *,
    replicas: int = 1,
    router: Router | None = None,
    depth: int = 1,
    aborts: Sequence[tuple[float, str]] = (),
    limits: Limits | None = None,
    block_bytes: float = 0.0,
    fast: bool = False,
    about: Mapping[str, Any] | None = None,
    timeline: Timeline | None = None,
) -> Result:
    """Play a workload to its end.

    Args:
        workload: requests, true lengths included.
        config: settings of each scheduler.
        policy: makes fresh parts for each of them.
        cost: how long a step takes.
        replicas: how many engines.
        router: sends requests to them; needed with more than one.
        depth: submitted steps of an engine that may be unfinished when it plans the next.
        aborts: (seconds, request id).
        limits: for goodput.
        block_bytes: of one KV block, for what is moved.
        fast: merge runs of decode steps; see :mod:`hopon.sim.fast`.
        about: goes into the result.
        timeline: notes every step of the only replica; the exact mode only.

    Raises:
        ValueError: settings that cannot work, or requests that wait for something that never comes; names them.
    """
    if replicas < 1:
        raise ValueError(f"there must be at least 1 replica, got {replicas}")
    if fast and depth > 1:
        raise ValueError(f"the fast mode plans no step beside another: depth must be 1, got {depth}")
    if timeline is not None and (fast or replicas > 1):
        raise ValueError(
            f"a timeline shows every step of one engine: leave the fast mode, and take 1 replica, got {replicas}"
        )
    meter = timeline.meter(block_bytes=block_bytes) if timeline else Meter(block_bytes=block_bytes)
    watched = timeline.watch if timeline else _unwatched
    fleet = [
        make_replica(workload, config, watched(policy(config)), cost, depth=depth, index=index, fast=fast)
        for index in range(replicas)
    ]
    simulation = Simulation(fleet, router=router, watcher=meter, fast=fast)
    simulation.run(commands(workload, aborts))
    simulation.check_end()
    meter.close(fleet)
    return Result.of(about or {}, meter, limits)
