"""One scheduler: the engine in simulated time, the simulator and a played journal make the same plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from hopon.core.clock import VirtualClock
from hopon.core.config import SchedulerConfig
from hopon.core.engine import Abort, CloseInput, Command, Engine, EngineStats, Shutdown
from hopon.core.plan import StepPlan
from hopon.core.policy.preset import Policy
from hopon.core.policy.systems.hopon import Hopon
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, FinishReason
from hopon.metrics import Recorder, RequestRecord
from hopon.sim.cost import Cost, Linear, Link
from hopon.sim.loop import CostPace, Replica, Simulation
from hopon.sim.replay import replay
from hopon.sim.result import Meter
from hopon.sim.run import commands
from hopon.sim.timed import TimedDevice
from hopon.sim.tokens import SimulatedDevice
from hopon.testing import Finished, LedgerExecutor, ScriptedInbox
from hopon.tracing import Ended, Entry, JournalScheduler, PlanDigest, read_journal, write_journal
from hopon.workload.ask import Workload
from hopon.workload.draw import Sharing, draw
from hopon.workload.lengths import Uniform
from tests.core.systems.drive import NAMES, random_system, trace_fields
from tests.core.test_identity import requests

LINK = Link(block_bytes=1.0, host_bandwidth=100.0, copy_bandwidth=1000.0)
COST = Linear(base=1.0, per_sequence=0.125, per_prompt_token=0.0625, link=LINK)
"""Sums of powers of two: a time has one value, however it was added up."""


@dataclass
class Heard:
    """What a driver planned and told."""

    plans: list[tuple[float, PlanDigest]] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    streams: bool = True  # news is told as it comes


class Listening(Scheduler):
    """Keeps the plans that do anything."""

    heard: Heard

    def plan(self, now: float) -> StepPlan:
        plan = super().plan(now)
        if not plan.is_empty:
            self.heard.plans.append((now, PlanDigest.of(plan)))
        return plan


Made = Callable[[], tuple[SchedulerConfig, Policy]]


def listening(made: Made, heard: Heard) -> Listening:
    scheduler = Listening(*made())
    scheduler.heard = heard
    heard.streams = scheduler.policy.delivery == "stream"
    return scheduler


def by_engine(made: Made, work: Workload, aborts: Sequence[tuple[float, str]], depth: int, cost: Cost = COST) -> Heard:
    """The real engine loop on a virtual clock."""
    heard = Heard()
    clock = VirtualClock()
    device = TimedDevice(SimulatedDevice(work.output_lengths.__getitem__), CostPace(cost), clock)
    engine = Engine(listening(made, heard), device, clock=clock, depth=depth)
    recorder = Recorder()
    for ask in work:
        recorder.expect(ask.request())

    def emit(news: Sequence[Delta], stats: EngineStats) -> None:
        recorder.hear(news)

    events: list[tuple[float, Command]] = [*commands(work, aborts), (1e9, Shutdown())]
    engine.run(ScriptedInbox(clock, events), emit)
    heard.records = recorder.records()
    return heard


def by_simulator(made: Made, work: Workload, aborts: Sequence[tuple[float, str]], depth: int) -> Heard:
    heard = Heard()
    device = SimulatedDevice(work.output_lengths.__getitem__)
    replica = Replica(listening(made, heard), device, CostPace(COST), depth=depth)
    meter = Meter()
    Simulation([replica], watcher=meter).run(commands(work, aborts))
    heard.records = meter.recorder.records()
    return heard


def random_work(rng: random.Random, config: SchedulerConfig) -> Workload:
    """Few tokens, some beginnings shared, limits above the true lengths; times are multiples of 1/8."""
    most = max(1, config.max_model_len // 3)
    work = draw(
        count=rng.randint(1, 25),
        rate=rng.choice([0.0, 0.02, 0.1, 0.5]),
        inputs=Uniform(1, most),
        outputs=Uniform(1, most),
        sharing=Sharing(groups=2, tokens=most) if rng.random() < 0.5 else None,
        seed=rng.randrange(10**6),
    )
    asks = tuple(
        replace(ask, arrival=round(8 * ask.arrival) / 8, max_tokens=ask.output_tokens + rng.choice([0, 0, 1, most]))
        for ask in work
    )
    return replace(work, asks=asks)


def random_aborts(rng: random.Random, work: Workload) -> list[tuple[float, str]]:
    gone = []
    for _ in range(rng.choice([0, 1, 3])):
        ask = rng.choice(work.asks)
        gone.append((ask.arrival + rng.randrange(400) / 8, str(ask.number)))
    return gone


@pytest.mark.parametrize("name", NAMES)
def test_v115_engine_and_simulator_make_the_same_plans(name: str, effort: Callable[[int, int], int]) -> None:
    """For every preset the engine in simulated time and the simulator plan the same steps at the same times, and
    their clients hear the same at the same times."""
    compared = 0
    for seed in range(effort(15, 300)):
        rng = random.Random(f"{name} {seed}")

        def made(seed: int = seed) -> tuple[SchedulerConfig, Policy]:
            return random_system(random.Random(f"{name} {seed}"), name, trace_fields)

        work = random_work(rng, made()[0])
        aborts = random_aborts(rng, work)
        depth = rng.choice([1, 1, 2, 3])
        engine = by_engine(made, work, aborts, depth)
        simulated = by_simulator(made, work, aborts, depth)
        assert simulated.plans == engine.plans, f"{name}, workload {seed}"
        assert simulated.records == engine.records, f"{name}, workload {seed}"
        compared += len(engine.plans)
    assert compared > 300


@pytest.mark.parametrize("name", NAMES)
def test_true_lengths_change_no_plan_before_they_show(name: str, effort: Callable[[int, int], int]) -> None:
    """One request ends earlier than in another run: until that token is out, both plan the same at the same times."""
    compared = 0
    for seed in range(effort(8, 200)):
        rng = random.Random(f"peek {name} {seed}")

        def made(seed: int = seed) -> tuple[SchedulerConfig, Policy]:
            return random_system(random.Random(f"{name} {seed}"), name, trace_fields)

        late = random_work(rng, made()[0])
        late = replace(late, asks=tuple(replace(ask, max_tokens=ask.output_tokens + 1) for ask in late))
        one = rng.choice(late.asks)
        if one.output_tokens == 1:
            continue
        shorter = replace(one, output_tokens=rng.randrange(1, one.output_tokens))
        early = replace(late, asks=tuple(shorter if ask is one else ask for ask in late))
        [first, second] = (by_simulator(made, workload, (), 1) for workload in (late, early))
        [end] = [r for r in second.records if r.request_id == str(one.number)]
        if end.finish is not FinishReason.STOP:
            continue
        # With delivery by the batch the end was known before it was told, but not before the start.
        told = end.last_token if second.streams else end.admitted
        assert told is not None
        before = [plan for plan in first.plans if plan[0] < told]
        assert before == [plan for plan in second.plans if plan[0] < told], f"{name}, workload {seed}"
        compared += len(before)
    assert compared > 20


class Odd(LedgerExecutor):
    """A ledger whose steps take times that no cost model knows."""

    clock: VirtualClock
    rng: random.Random

    def submit(self, plan: StepPlan) -> Finished:
        self.clock.advance_to(self.clock.now() + self.rng.random())
        return super().submit(plan)


class LateInbox(ScriptedInbox):
    """The host takes time of its own between two steps."""

    def __init__(self, clock: VirtualClock, events: Sequence[tuple[float, Command]], rng: random.Random) -> None:
        super().__init__(clock, events)
        self._rng = rng

    def drain(self, timeout: float | None) -> list[Command]:
        self._clock.advance_to(self._clock.now() + self._rng.random() / 10)
        return super().drain(timeout)


def record(made: Made, seed: int) -> list[Entry]:
    """A run of the real engine, as a journal: over a device with tokens and ends of its own, with aborts."""
    rng = random.Random(seed)
    config, policy = made()
    entries: list[Entry] = []
    clock = VirtualClock()
    device = Odd(config.num_blocks, config.block_size, num_host_blocks=config.num_host_blocks, stop_token=999)
    device.clock, device.rng = clock, rng
    engine = Engine(JournalScheduler(config, policy, entries.append), device, clock=clock)
    asked = [replace(r, arrival=rng.uniform(0, 30)) for r in requests(rng, 15)]
    asked = [replace(r, params=replace(r.params, prompt_logprobs=None)) for r in asked]
    events: list[tuple[float, Command]] = [(r.arrival, r) for r in asked]
    events.append((max(r.arrival for r in asked), CloseInput()))
    events += [(rng.uniform(0, 60), Abort(rng.choice(asked).request_id)) for _ in range(3)]
    events.append((1e6, Shutdown()))
    engine.run(LateInbox(clock, events, rng), lambda news, stats: None)
    return entries


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_run_gives_the_same_plans_again(
    name: str, tmp_path: Path, effort: Callable[[int, int], int]
) -> None:
    """A journal of the engine, written and read again, makes the simulator plan every step as the engine did."""
    plans = 0
    for seed in range(effort(6, 100)):

        def made(seed: int = seed) -> tuple[SchedulerConfig, Policy]:
            return random_system(random.Random(f"{name} {seed}"), name, trace_fields)

        write_journal(tmp_path / "run.jsonl", made()[0], record(made, seed))
        config, entries = read_journal(tmp_path / "run.jsonl")
        assert config == made()[0]
        found = replay(config, made()[1], entries)
        assert found.difference is None
        plans += found.num_plans
    assert plans > 50


def test_a_different_run_is_told_apart(tmp_path: Path) -> None:
    """Played with another budget than it was recorded with, a journal names the first plan that differs."""
    config = SchedulerConfig(num_blocks=50, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)
    entries = record(lambda: (config, Hopon().policy(config)), 1)
    other = replace(config, max_num_batched_tokens=32)
    assert replay(config, Hopon().policy(config), entries).difference is None
    difference = replay(other, Hopon().policy(other), entries).difference
    assert difference is not None
    assert difference.startswith("plan ")


def test_a_journal_that_stops_short_is_refused() -> None:
    """What a request would have said is not known, so nothing is played."""
    config = SchedulerConfig(num_blocks=50, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)
    entries = record(lambda: (config, Hopon().policy(config)), 1)
    first = next(i for i, entry in enumerate(entries) if isinstance(entry, Ended))
    with pytest.raises(ValueError, match="ends before"):
        replay(config, Hopon().policy(config), entries[:first])
