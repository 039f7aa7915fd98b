"""A recorded run of the real engine, played again in the simulator, and whether it plans the same.

The simulator is given what the engine was told and when, how long its steps and its own work between them took, and
which tokens came out. It is not given the plans: those it makes itself, and they are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from hopon.core.config import SchedulerConfig
from hopon.core.engine import Abort, CloseInput, Command
from hopon.core.plan import StepPlan
from hopon.core.policy.preset import Policy
from hopon.core.scheduler import Scheduler
from hopon.sim.loop import Replica, Simulation
from hopon.sim.result import Meter
from hopon.sim.tokens import ScriptedDevice
from hopon.tracing import Aborted, Closed, Committed, Ended, Entry, PlanDigest, Planned, StepFeatures, Told


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What came of it.

    Args:
        num_plans: plans of the journal that do anything.
        difference: in words, the first plan that differs; None when all are the same.
        meter: what the simulator counted.
    """

    num_plans: int
    difference: str | None
    meter: Meter


class _RecordedPace:
    """Times as they were: when each step was committed, and when the engine planned after each commit."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        committed = {entry.step: entry.time for entry in entries if isinstance(entry, Committed)}
        steps = [entry.step for entry in entries if isinstance(entry, Planned) and entry.plan.does_anything]
        self._ends = iter([committed.get(step, inf) for step in steps])
        resumes = []
        upcoming = inf
        for entry in reversed(entries):
            if isinstance(entry, Planned):
                upcoming = entry.time
            elif isinstance(entry, Committed):
                resumes.append(upcoming)
        self._resumes = iter(reversed(resumes))

    def finish(self, plan: StepPlan, step: StepFeatures, start: float) -> float:
        """Of the same step in the recorded run."""
        return max(start, next(self._ends, inf))

    def resume(self, plan: StepPlan, now: float) -> float:
        """After the same commit in the recorded run; never after its last one."""
        return next(self._resumes, inf)


def replay(config: SchedulerConfig, policy: Policy, entries: Sequence[Entry], *, depth: int = 1) -> Replay:
    """Play a journal.

    Args:
        config: the scheduler's settings in the recorded run.
        policy: fresh parts of the recorded run's policy.
        entries: the journal.
        depth: the recorded engine's.

    Raises:
        ValueError: the journal ends before one of its requests does.
    """
    told, outputs = _requests(entries)
    meter = Meter(keep_plans=True)
    device = ScriptedDevice(outputs)
    replica = Replica(Scheduler(config, policy), device, _RecordedPace(entries), depth=depth)
    Simulation([replica], watcher=meter).run(told)
    expected = [(e.time, e.plan) for e in entries if isinstance(e, Planned) and e.plan.does_anything]
    found = [(time, PlanDigest.of(plan)) for _, time, plan in meter.plans]
    meter.close([replica])
    return Replay(num_plans=len(expected), difference=_difference(expected, found), meter=meter)


def _requests(entries: Sequence[Entry]) -> tuple[list[tuple[float, Command]], list[tuple[int, ...]]]:
    """Commands at the times at which they were taken in, and the output of each request by its number.

    A request's seed becomes its number, by which the device knows it; no plan depends on it.
    """
    commands: list[tuple[float, Command]] = []
    waiting: list[Command] = []  # taken in before the next plan
    outputs: list[tuple[int, ...]] = []
    numbers: dict[str, int] = {}
    for entry in entries:
        match entry:
            case Told(request=request):
                numbers[request.request_id] = len(outputs)
                waiting.append(replace(request, seed=len(outputs)))
                outputs.append(())
            case Aborted(request_id=request_id):
                waiting.append(Abort(request_id))
            case Closed():
                waiting.append(CloseInput())
            case Planned(time=time):
                commands += [(time, command) for command in waiting]
                waiting = []
            case Ended(request_id=request_id, output=output):
                outputs[numbers.pop(request_id)] = output
    if numbers:
        raise ValueError(f"the journal ends before {len(numbers)} of its requests, such as {next(iter(numbers))!r}")
    return commands, outputs


def _difference(expected: Sequence[tuple[float, PlanDigest]], found: Sequence[tuple[float, PlanDigest]]) -> str | None:
    for i, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return f"plan {i}: recorded {one}, simulated {other}"
    if len(expected) != len(found):
        return f"{len(expected)} plans recorded, {len(found)} simulated"
    return None
