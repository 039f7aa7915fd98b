"""On a device made of integers, what a request gets never depends on who shares its batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hopon.core.clock import VirtualClock
from hopon.core.config import SchedulerConfig
from hopon.core.engine import Abort, Command, Engine, EngineStats, Shutdown
from hopon.core.plan import StepPlan
from hopon.core.policy.preset import Policy
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, FinishReason, Logprob, Request, SamplingParams
from hopon.testing import Finished, LedgerExecutor, ScriptedInbox

STOP = 999


class Timed(LedgerExecutor):
    """A ledger that takes a second of virtual time per step."""

    clock: VirtualClock

    def submit(self, plan: StepPlan) -> Finished:
        self.clock.advance_to(self.clock.now() + 1.0)
        return super().submit(plan)


Heard = dict[str, tuple[list[int], list[Logprob], list[Logprob], FinishReason]]


def serve(
    settings: SchedulerConfig,
    events: list[tuple[float, Command]],
    depth: int = 1,
    executor: type[Timed] = Timed,
    policy: Policy | None = None,
) -> tuple[Heard, EngineStats]:
    """Run the real engine loop over scripted arrivals; what each request heard, and the last statistics."""
    clock = VirtualClock()
    device = executor(
        settings.num_blocks, settings.block_size, num_host_blocks=settings.num_host_blocks, stop_token=STOP
    )
    device.clock = clock
    engine = Engine(Scheduler(settings, policy), device, clock=clock, depth=depth)
    outputs: dict[str, tuple[list[int], list[Logprob], list[Logprob]]] = {}
    heard: Heard = {}

    def emit(news: object, stats: EngineStats) -> None:
        assert isinstance(news, list)
        for delta in news:
            assert isinstance(delta, Delta)
            tokens, logprobs, scores = outputs.setdefault(delta.request_id, ([], [], []))
            tokens += delta.tokens
            logprobs += delta.logprobs
            scores += delta.prompt_logprobs
            if delta.finish is not None:
                heard[delta.request_id] = (tokens, logprobs, scores, delta.finish)

    end = max(time for time, _ in events)
    inbox = ScriptedInbox(clock, [*events, (end + 1e9, Shutdown())])
    engine.run(inbox, emit)
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_free == settings.num_blocks
    assert engine.scheduler.host_pool.num_free == settings.num_host_blocks
    return heard, engine.stats()


def settings(rng: random.Random, *, tight: bool) -> SchedulerConfig:
    size = rng.choice([1, 2, 16, 32])
    return SchedulerConfig(
        num_blocks=-(-(140 if tight else 3000) // size),
        block_size=size,
        max_model_len=128,
        max_num_seqs=rng.choice([2, 8, 20]),
        max_num_batched_tokens=rng.choice([20, 64, 500]),
        long_prefill_token_threshold=rng.choice([0, 1, 7]),
        enable_prefix_caching=rng.random() < 0.5,
    )


def requests(rng: random.Random, count: int) -> list[Request]:
    stem = [rng.randrange(900) for _ in range(48)]
    made = []
    for i in range(count):
        prompt = (*stem[: rng.choice([0, 20, 48])], *(rng.randrange(900) for _ in range(rng.randint(1, 40))))
        made.append(
            Request(
                request_id=str(i),
                prompt=prompt,
                seed=rng.getrandbits(64),
                stop_token_ids=(STOP,),
                params=SamplingParams(
                    temperature=rng.choice([0.0, 1.0]),
                    max_tokens=rng.randint(1, 60),
                    min_tokens=rng.choice([0, 0, 1]),
                    logprobs=rng.choice([None, 2]),
                    prompt_logprobs=rng.choice([None, None, 1]),
                ),
            )
        )
    return made


ALONE = SchedulerConfig(
    num_blocks=200, max_model_len=128, max_num_batched_tokens=128, max_num_seqs=1, enable_prefix_caching=False
)


def test_v034_v039_v041_alone_or_in_any_crowd(effort: Callable[[int, int], int]) -> None:
    """Random mates, arrivals, aborts, chunk and block sizes, prefix hits, tiny pools, pipelining: the same tokens,
    log-probabilities and end as alone."""
    preemptions = hits = 0
    for seed in range(effort(60, 1500)):
        rng = random.Random(seed)
        asked = requests(rng, 14)
        alone = {r.request_id: serve(ALONE, [(0.0, r)])[0][r.request_id] for r in asked}
        events: list[tuple[float, Command]] = [(rng.choice([0.0, rng.uniform(0, 60)]), r) for r in asked]
        gone = {r.request_id for r in asked if rng.random() < 0.15}
        events += [(rng.uniform(0, 80), Abort(name)) for name in sorted(gone)]
        heard, stats = serve(settings(rng, tight=rng.random() < 0.7), events, depth=rng.choice([1, 1, 2, 3]))
        preemptions += stats.num_preemptions
        hits += stats.prefix_cache_hits
        assert set(heard) | gone == set(alone)
        for name, got in heard.items():
            if got[3] is FinishReason.ABORT:
                assert name in gone
                assert got[0] == alone[name][0][: len(got[0])]
            else:
                assert got == alone[name], f"request {name} of schedule {seed} depends on its mates"
    assert preemptions > 30
    assert hits > 500


class Amnesiac(Timed):
    """A mutant: forgets what a reopened row had generated (the mistake of a resume that replays the prompt only)."""

    def submit(self, plan: StepPlan) -> Finished:
        finished = super().submit(plan)
        for opened in plan.opened:
            if opened.output:
                self._rows[opened.row].tokens[-1] = 0
        return finished


class Sharer(Timed):
    """A mutant: every row's first block lies in block 0."""

    def submit(self, plan: StepPlan) -> Finished:
        finished = super().submit(plan)
        for chunk in plan.chunks:
            self._rows[chunk.row].blocks[0] = 0
        return finished


@pytest.mark.parametrize("mutant", [Amnesiac, Sharer])
def test_mutants_are_caught(mutant: type[Timed]) -> None:
    """A device that loses output at resumption, or shares blocks between rows, does not pass."""
    differs = False
    for seed in range(10):
        rng = random.Random(seed)
        asked = requests(rng, 14)
        tight = SchedulerConfig(
            num_blocks=10, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False
        )
        right, _ = serve(tight, [(0.0, r) for r in asked])
        try:
            wrong, _ = serve(tight, [(0.0, r) for r in asked], executor=mutant)
        except AssertionError:
            differs = True
            continue
        differs = differs or wrong != right
    assert differs


def test_v081_first_token_times_survive_preemption() -> None:
    """A preempted request keeps its admission time, and its tokens' times never go backwards."""
    tight = SchedulerConfig(num_blocks=8, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(tight)
    engine = Engine(scheduler, LedgerExecutor(8, 16), clock=(clock := VirtualClock()))
    params = SamplingParams(max_tokens=60, temperature=0.0)
    asked = [Request(request_id=str(i), prompt=(i + 1,) * 30, params=params, seed=0) for i in range(3)]
    told: dict[str, list[Delta]] = {}
    commands: list[Command] = list(asked)
    while scheduler.has_work or commands:
        clock.advance_to(clock.now() + 1.0)
        for delta in engine.step(commands):
            told.setdefault(delta.request_id, []).append(delta)
        commands = []
    assert scheduler.counters.num_preemptions > 0
    for deltas in told.values():
        assert len({d.admitted for d in deltas}) == 1
        assert [d.time for d in deltas] == sorted(d.time for d in deltas)
        assert sum(len(d.tokens) for d in deltas) == 60


def test_shutdown_ends_every_request_once() -> None:
    """What is unfinished at a Shutdown ends with ABORT, and the loop returns."""
    params = SamplingParams(max_tokens=None)
    events: list[tuple[float, Command]] = [
        (0.0, Request(request_id="a", prompt=(1,), params=params, seed=1)),
        (5.0, Shutdown()),
    ]
    heard, _ = serve(ALONE, events)
    assert heard["a"][3] is FinishReason.ABORT
    assert heard["a"][0]
