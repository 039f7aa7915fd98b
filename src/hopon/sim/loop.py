"""The simulator's only loop: a heap of events and a virtual clock, around the engine's own scheduler.

A :class:`Replica` does what ``Engine.run`` does, in the same order (take in what has arrived, plan, submit, commit),
but where the engine waits it leaves an event in the heap. Several replicas are more entries in the same heap, behind a
router. What the host needs to compute all this never enters the simulated time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf, isinf
from typing import Literal, Protocol

from hopon.core.engine import Abort, CloseInput, Command, Shutdown
from hopon.core.plan import Executor, StepPlan, StepResult
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, Request
from hopon.sim.cost import Cost
from hopon.sim.fast import LeapingScheduler, merge
from hopon.sim.tokens import SimulatedDevice
from hopon.tracing import StepFeatures, features


class Watcher(Protocol):
    """Hears of a replica's requests, steps and news."""

    def sent(self, replica: Replica, request: Request) -> None:
        """A request was sent to it."""

    def stepped(self, replica: Replica, plan: StepPlan, step: StepFeatures, start: float, seconds: float) -> None:
        """A step was submitted; it takes ``seconds`` from ``start`` on."""

    def leapt(self, replica: Replica, names: Sequence[str], start: float, times: Sequence[float]) -> None:
        """Decode steps of these requests were merged; each request got a token at each of the times."""

    def heard(self, replica: Replica, news: Sequence[Delta]) -> None:
        """News was told."""


class Pace(Protocol):
    """How long things take on one replica."""

    def finish(self, plan: StepPlan, step: StepFeatures, start: float) -> float:
        """When a step that starts at ``start`` is done."""

    def resume(self, plan: StepPlan, now: float) -> float:
        """When the driver plans again, after it took in at ``now`` what came of a step."""


class CostPace:
    """A cost model; the driver itself takes no time."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def finish(self, plan: StepPlan, step: StepFeatures, start: float) -> float:
        """By the model."""
        return start + self._cost.seconds(step)

    def resume(self, plan: StepPlan, now: float) -> float:
        """At once."""
        return now


class Replica:
    """One engine: a scheduler, a device, and how long its steps take.

    Args:
        scheduler: decides.
        device: yields tokens.
        pace: says how long.
        depth: submitted steps that may be unfinished when the next one is planned.
        index: which of the replicas it is.
    """

    def __init__(self, scheduler: Scheduler, device: Executor, pace: Pace, *, depth: int = 1, index: int = 0) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.scheduler = scheduler
        self.device = device
        self.pace = pace
        self.depth = depth
        self.index = index
        self.inbox: list[Command] = []
        self.submitted: deque[tuple[StepPlan, StepResult, float]] = deque()  # with the time at which it is done
        self.busy_until = 0.0
        self.wake_at: float | None = None  # of the last plan
        self.waits: Literal["commands", "step", "itself"] = "commands"  # what its driver waits for
        self.turn = 0  # wake-ups of an earlier turn are void

    @property
    def load(self) -> int:
        """Unfinished requests, those included that it has not been told of."""
        return self.scheduler.num_running + self.scheduler.num_waiting + len(self.inbox)


class Router(Protocol):
    """Sends a request to one of several replicas."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        """Its index."""


class Simulation:
    """Plays commands on replicas.

    Args:
        replicas: one or several, in the order of their indices.
        router: where a request goes; None with a single replica.
        watcher: hears everything.
        fast: merge runs of decode steps; see :mod:`hopon.sim.fast`. Replicas need a depth of 1, a
            :class:`LeapingScheduler` and a :class:`SimulatedDevice`.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        router: Router | None = None,
        watcher: Watcher,
        fast: bool = False,
    ) -> None:
        if not replicas or (len(replicas) > 1 and router is None):
            raise ValueError(f"{len(replicas)} replicas need a router" if replicas else "there must be a replica")
        self._replicas = replicas
        self._router = router
        self._watcher = watcher
        self._fast = fast
        self._heap: list[tuple[float, int, int, int]] = []  # time, order, replica, turn
        self._order = 0
        self._owners: dict[str, int] = {}
        self._commands: Iterator[tuple[float, Command]] = iter(())
        self._upcoming: tuple[float, Command] | None = None
        self.now = 0.0

    def run(self, commands: Iterable[tuple[float, Command]]) -> None:
        """Play commands, which must come in the order of their times, until nothing is left to do.

        Raises:
            ValueError: a time that is negative or before the one in front of it.
        """
        self._commands = iter(commands)
        self._advance(0.0)
        heap = self._heap
        while heap or self._upcoming is not None:
            arrival = inf if self._upcoming is None else self._upcoming[0]
            self.now = min(arrival, heap[0][0]) if heap else arrival
            awake: set[int] = set()
            while self._upcoming is not None and self._upcoming[0] <= self.now:
                awake.update(self._deliver(self._upcoming[1]))
                self._advance(self.now)
            while heap and heap[0][0] <= self.now:
                _, _, index, turn = heappop(heap)
                if self._replicas[index].turn == turn:
                    awake.add(index)
            for index in sorted(awake):
                self._run(self._replicas[index])

    def check_end(self) -> None:
        """Raises ValueError when requests are left that wait for something which never comes."""
        for replica in self._replicas:
            if replica.scheduler.has_work:
                raise ValueError(
                    f"{replica.load} requests wait for ever: nothing more arrives, and the policy's "
                    f"{type(replica.scheduler.policy.composition).__name__} plans nothing until then"
                )

    def _advance(self, now: float) -> None:
        self._upcoming = next(self._commands, None)
        if self._upcoming is not None and not self._upcoming[0] >= now:
            raise ValueError(f"a command at {self._upcoming[0]} s comes behind one at {now} s")

    def _deliver(self, command: Command) -> Iterable[int]:
        """Into inboxes; whose."""
        match command:
            case Request():
                index = self._router.choose(command, self._replicas) if self._router else 0
                self._owners[command.request_id] = index
                self._watcher.sent(self._replicas[index], command)
                targets = [index]
            case Abort():
                targets = [self._owners.get(command.request_id, 0)]  # nobody's is ignored by anybody
            case CloseInput() | Shutdown():
                targets = list(range(len(self._replicas)))
        for index in targets:
            self._replicas[index].inbox.append(command)
        # Who waits for a step or for itself takes the command in after that.
        return [index for index in targets if self._replicas[index].waits == "commands"]

    def _run(self, replica: Replica) -> None:
        """What an engine does until it has to wait."""
        scheduler = replica.scheduler
        now = self.now
        replica.turn += 1
        waited, replica.waits = replica.waits, "commands"
        rested = waited == "itself"
        if waited == "step":
            plan, result, _ = replica.submitted.popleft()
            if self._commit(replica, plan, result) or (self._fast and self._leap(replica, plan)):
                return
        while rested or replica.inbox or self._may_plan(replica):
            rested = False
            self._take_in(replica)
            plan = scheduler.plan(now)
            replica.wake_at = plan.wake_at
            if not plan.is_empty:
                self._submit(replica, plan)
            if replica.submitted and (plan.is_empty or len(replica.submitted) >= replica.depth):
                replica.waits = "step"
                self._sleep(replica, max(self.now, replica.submitted[0][2]))
                return
            # Nothing was submitted, or the pipeline is filling: only what needs no step can be told.
            if self._commit(replica, StepPlan(step=-1) if replica.submitted else plan, StepResult()):
                return

    def _may_plan(self, replica: Replica) -> bool:
        """Whether an engine would plan without having heard anything; where it would later, it is woken then."""
        wake_at = replica.wake_at
        if wake_at is None or replica.submitted or wake_at <= self.now:
            return replica.scheduler.has_work
        self._sleep(replica, wake_at)
        return False

    def _leap(self, replica: Replica, plan: StepPlan) -> bool:
        """Repeat a decode step as long as nothing can happen; whether it was."""
        scheduler, device = replica.scheduler, replica.device
        if replica.inbox or not isinstance(scheduler, LeapingScheduler) or not isinstance(device, SimulatedDevice):
            return False
        limit = scheduler.steps_before_news(plan, device)
        until = inf if self._upcoming is None else self._upcoming[0]
        step = features(plan)
        if limit < 1 or step.num_prefills or self.now >= until:
            return False
        times = merge(replica.pace, plan, step, self.now, limit, until)
        names = scheduler.leap(len(times), device)
        replica.busy_until = times[-1]
        self._watcher.leapt(replica, names, self.now, times)
        replica.waits = "itself"
        self._sleep(replica, times[-1])
        return True

    def _take_in(self, replica: Replica) -> None:
        scheduler = replica.scheduler
        for command in replica.inbox:
            match command:
                case Request():
                    scheduler.add(command, self.now)
                case Abort():
                    scheduler.abort(command.request_id, self.now)
                case CloseInput():
                    scheduler.close_input()
                case Shutdown():
                    scheduler.abort_all(self.now)
        replica.inbox.clear()

    def _submit(self, replica: Replica, plan: StepPlan) -> None:
        step = features(plan)
        start = max(self.now, replica.busy_until)
        replica.busy_until = replica.pace.finish(plan, step, start)
        result = replica.device.submit(plan).result()
        replica.submitted.append((plan, result, replica.busy_until))
        self._watcher.stepped(replica, plan, step, start, replica.busy_until - start)

    def _commit(self, replica: Replica, plan: StepPlan, result: StepResult) -> bool:
        """Take in what came of a step and tell it; whether the driver is busy for a while now."""
        news = replica.scheduler.commit(plan, result, self.now)
        if news:
            for delta in news:
                if delta.finish is not None:
                    self._owners.pop(delta.request_id, None)
            self._watcher.heard(replica, news)
        resume = replica.pace.resume(plan, self.now)
        if resume <= self.now:
            return False
        replica.waits = "itself"
        self._sleep(replica, resume)
        return True

    def _sleep(self, replica: Replica, until: float) -> None:
        """Until then (for ever, where that is infinite), or until something arrives where that is allowed."""
        if not isinf(until):
            self._order += 1
            heappush(self._heap, (until, self._order, replica.index, replica.turn))
